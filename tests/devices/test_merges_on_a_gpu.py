"""Merges, evaluations and peers on the simulated GPU give what they give on the CPU."""

import pytest
import torch
from safetensors.torch import load_file

import massmerge
from answers import assert_same_answers
from eval_suite import write_suite
from massmerge.io.placement import Placement
from massmerge.model.static import StaticModel
from massmerge.research.peers import PEERS
from models import FAMILIES, family_bundle, text_bundle, write_recipe
from peer_sources import opened, peer_folder, some_inputs
from simulated_device import simulated_gpu

_DEVICES = ("cpu", "cuda:0")


@pytest.fixture
def gpu(root):
    family_bundle(root, "bert"), text_bundle(root), peer_folder(root, "bert")  # made on the CPU
    with simulated_gpu() as device, torch.no_grad():
        yield device


def recipe(root, **options):
    folder = family_bundle(root, "bert").parent
    return write_recipe(folder, list("abc"), name="gpu.yaml", **options)


@pytest.mark.parametrize("options", [{"rank": 8, "redundancy": {"metric": "angles"}}, {"rank": 0.9}], ids=str)
def test_a_bundle_that_is_merged_on_the_gpu_answers_as_one_of_the_cpu(root, tmp_path, gpu, options):
    given, inputs = recipe(root, **options), FAMILIES["bert"].make_inputs(4)
    made = [massmerge.merge(given, tmp_path / device.partition(":")[0], device=device) for device in _DEVICES]
    found, expected = (massmerge.load(path, device="cpu") for path in made)
    assert_same_answers(found.predict(inputs), expected.predict(inputs))
    assert massmerge.verify(made[1], experts=True, folder=given.parent, device="cuda:0").ok


@pytest.mark.parametrize("method", ["ties", "dare", "consensus", "tsv_m", "iso_cts", "emr"])
def test_a_static_merge_on_the_gpu_is_that_of_the_cpu(root, tmp_path, gpu, method):
    given = recipe(root, method=method)
    made = [massmerge.merge(given, tmp_path / device.partition(":")[0], device=device) for device in _DEVICES]
    for path in sorted(made[0].rglob("model.safetensors")):
        found, expected = load_file(made[1] / path.relative_to(made[0])), load_file(path)
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[n], t, atol=1e-5) for n, t in expected.items())
    inputs, told = FAMILIES["bert"].make_inputs(3), {"task": "a"}
    answers = [[(p.label, round(p.score, 4)) for p in StaticModel(made[0], device=d).predict(inputs, **told)]
               for d in _DEVICES]  # fmt: skip
    assert answers[0] == answers[1]


def test_a_bundle_and_its_experts_are_measured_on_the_gpu(root, tmp_path, gpu):
    bundle = text_bundle(root)
    labels = massmerge.load(bundle, device="cpu").labels
    rows = {task: [(f"a {word} film", names[0]) for word in ("dull", "free")] for task, names in labels.items()}
    suite = write_suite(tmp_path, rows)
    options = {"experts": True, "folder": bundle.parent}
    found, expected = (massmerge.evaluate(bundle, suite, device=device, **options) for device in ("cuda:0", "cpu"))
    assert found.to_dict()["tasks"] == expected.to_dict()["tasks"]


@pytest.mark.parametrize("name", ["smile_1", "arrow"])
def test_a_routed_peer_answers_on_the_gpu_as_on_the_cpu(root, gpu, name):
    folder = peer_folder(root, "bert")
    found = []
    for device in ("cpu", "cuda:0"):
        sources = opened.__wrapped__(folder)
        sources.place = Placement.choose(device)
        found.append(PEERS[name](sources, None).predict(some_inputs("bert")["a"]))
    assert [(p.task, p.label) for p in found[0]] == [(p.task, p.label) for p in found[1]]
