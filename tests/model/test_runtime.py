"""Where a bundle's parts come from when it is loaded, and where they run."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

import massmerge
from massmerge.errors import InputError
from models import FAMILIES, family_bundle, write_family


def rows(count=4):
    inputs = FAMILIES["bert"].make_inputs(count)
    return [{name: tensor[i] for name, tensor in inputs.items()} for i in range(count)]


@pytest.fixture
def referring(tmp_path):
    """A bundle that refers to its base, and one that holds it."""
    recipe = write_family(tmp_path, "bert", {"a": 2, "b": 3}, rank=8)
    massmerge.merge(recipe, tmp_path / "copied")
    recipe.write_text(recipe.read_text().replace("rank: 8", "rank: 8\n  base: by_reference"))
    massmerge.merge(recipe, tmp_path / "referring")
    return tmp_path


def test_a_bundle_that_refers_to_its_base_holds_no_copy_of_it(referring):
    assert not (referring / "referring/base/model.safetensors").exists()


def test_a_bundle_that_refers_to_its_base_answers_as_one_that_holds_it(referring):
    held = massmerge.load(referring / "copied").predict(rows())
    referred = massmerge.load(referring / "referring").predict(rows())
    assert [(p.task, p.label, p.logit) for p in referred] == [(p.task, p.label, p.logit) for p in held]


def test_a_referred_base_that_has_changed_is_refused(referring):
    path = referring / "base/model.safetensors"
    tensors = load_file(path)
    tensors["embeddings.LayerNorm.bias"] += 1e-3
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InputError, match="has changed since the merge"):
        massmerge.load(referring / "referring")


def test_a_referred_base_that_is_gone_is_named(referring):
    (referring / "base").rename(referring / "elsewhere")
    with pytest.raises(InputError, match=r"stored by reference and is not available.*base"):
        massmerge.load(referring / "referring")


def test_an_unknown_device_is_refused_with_those_there_are(referring):
    with pytest.raises(InputError, match="cannot run on 'toaster'"):
        massmerge.load(referring / "copied", device="toaster")


def test_without_a_gpu_it_runs_on_the_cpu(referring):
    model = massmerge.load(referring / "copied")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert model.core.base.device.type == expected


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "gpt2"])
def test_a_site_that_the_base_lacks_is_a_problem_of_the_plan(tmp_path, name):
    recipe = write_family(tmp_path, name, {"a": 2}, rank=4, router={"site": "M9"})
    problems = massmerge.make_plan(recipe).errors
    assert [p.where for p in problems] == ["router.site"]
    assert "'M9'" in problems[0].message


def test_loading_is_silent_and_leaves_transformers_as_talkative_as_it_was(root, capfd):
    bundle = family_bundle(root, "vit")
    capfd.readouterr()
    logging.enable_progress_bar()
    logging.set_verbosity_warning()
    massmerge.load(bundle)  # its base has a pooler that no file has
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()
    assert logging.get_verbosity() == logging.WARNING
