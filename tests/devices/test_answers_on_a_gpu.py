"""A bundle answers on the simulated GPU as on the CPU: nothing forgets its device."""

import pytest
import torch

import massmerge
from answers import assert_same_answers
from massmerge.model.load import load_routing
from models import FAMILIES, family_bundle, rows_of, text_bundle, with_options
from simulated_device import GPU, simulated_gpu

_TEXTS = [
    "win a free phone now",
    "a moving, quiet film",
    "the bank raised rates",
    "what a dull day it was for all of us",
]


@pytest.fixture
def gpu(root):
    family_bundle(root, "vit"), family_bundle(root, "bert"), text_bundle(root)  # made on the CPU
    with simulated_gpu() as device, torch.no_grad():
        yield device


def both(bundle, **options):
    """The same bundle on the CPU and on the GPU."""
    return massmerge.load(bundle, device="cpu", **options), massmerge.load(bundle, device="cuda:0", **options)


@pytest.mark.parametrize("router", [{"top_k": 3, "threshold": 0.1}, {"unsure": 9.0}, {"token": "each"}], ids=str)
def test_images_of_mixed_sets_get_the_same_answers(root, tmp_path, gpu, router):
    """Sets of several tasks; a second look at all images with candidates; a vote of each token."""
    on_cpu, on_gpu = both(with_options(family_bundle(root, "vit"), tmp_path / "bundle", router=router))
    inputs = FAMILIES["vit"].make_inputs(6)
    assert on_gpu.core.placement.device == GPU
    assert len({tuple(p.routing.selected) for p in on_cpu.predict(inputs)}) > 1
    assert_same_answers(on_gpu.predict(inputs), on_cpu.predict(inputs))


def test_texts_get_the_same_answers_with_and_without_a_cache_and_with_the_task_given(root, gpu):
    on_cpu, on_gpu = both(text_bundle(root), cache="1GB")
    for _ in range(4):
        found = on_gpu.predict(_TEXTS)
    assert_same_answers(found, on_cpu.predict(_TEXTS))
    told = [(p.task, p.label) for p in on_gpu.predict(_TEXTS, task="spam")]
    assert told == [(p.task, p.label) for p in on_cpu.predict(_TEXTS, task="spam")]
    assert torch.allclose(on_gpu.embed(_TEXTS), on_cpu.embed(_TEXTS), atol=1e-5)


def test_a_fixed_first_pass_routes_the_same(root, tmp_path, gpu):
    folder = text_bundle(root).parent
    recipe = (folder / "recipe.yaml").read_text() + "\nrouter: {first_pass: fixed}\n"
    (folder / "fixed.yaml").write_text(recipe)
    on_cpu, on_gpu = both(massmerge.merge(folder / "fixed.yaml", tmp_path / "fixed"))
    assert_same_answers(on_gpu.predict(_TEXTS), on_cpu.predict(_TEXTS))


@pytest.mark.parametrize("kind", ["prototype", "linear", "nearest"])
def test_a_router_that_was_fitted_routes_the_same(root, tmp_path, kind):
    bundle = with_options(family_bundle(root, "bert"), tmp_path / "bundle")
    inputs = {task: rows_of(FAMILIES["bert"].make_inputs(6, seed=i)) for i, task in enumerate("abc")}
    massmerge.calibrate(bundle, inputs, kind=kind, device="cpu")
    with simulated_gpu(), torch.no_grad():
        on_cpu, on_gpu = both(bundle)
        assert_same_answers(on_gpu.predict(inputs["b"]), on_cpu.predict(inputs["b"]))


def test_a_calibration_on_the_gpu_fits_the_same_router(root, tmp_path, gpu):
    inputs = {task: rows_of(FAMILIES["bert"].make_inputs(4, seed=i)) for i, task in enumerate("abc")}
    found = []
    for device in ("cpu", "cuda:0"):
        bundle = with_options(family_bundle(root, "bert"), tmp_path / device.partition(":")[0])
        massmerge.calibrate(bundle, inputs, kind="prototype", device=device)
        found.append(massmerge.load(bundle, device="cpu").predict(inputs["a"]))
    assert_same_answers(*found)


def test_a_bundle_loaded_for_routing_routes_the_same(root, gpu):
    bundle = text_bundle(root)
    found, expected = (load_routing(bundle, device=device).route(_TEXTS) for device in ("cuda:0", "cpu"))
    assert [r.selected for r in found] == [r.selected for r in expected]
