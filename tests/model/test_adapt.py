"""`mass adapt`: a bundle learns from mixed inputs without names, or stays as it is."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from test_limits import inputs

import massmerge
import massmerge.model.adapt as adapting
from answers import vit_images
from massmerge import InputError
from massmerge.bundle.reader import Bundle
from massmerge.cli.main import main
from massmerge.merging.verify import verify_bundle
from massmerge.model.adapt import WAYS, adapt
from massmerge.model.router_file import FittedRouter, replace_router
from models import contents, image_bundle, text_bundle, with_options

MIXED = [text for texts in inputs(12).values() for text in texts]


@pytest.fixture
def bundle(root, tmp_path, monkeypatch):
    """A bundle of its own that may be changed."""
    monkeypatch.setattr(adapting, "LEAST", 30)
    return shutil.copytree(text_bundle(root), tmp_path / "bundle")


@pytest.fixture
def agreeing(monkeypatch):
    """Everything is better."""
    monkeypatch.setattr(adapting, "better", lambda before, after, tasks: True)


def test_a_bundle_that_would_route_no_better_is_left_as_it_is(bundle, monkeypatch):
    monkeypatch.setattr(adapting, "better", lambda before, after, tasks: False)
    before = contents(bundle)
    assert adapt(bundle, MIXED).way is None
    assert contents(bundle) == before


def test_an_adapted_router_is_the_bundle_s_from_then_on(bundle, agreeing):
    done = adapt(bundle, MIXED)
    assert done.way in WAYS
    assert (done.inputs, done.judged_by) == (36, "agreement")
    assert Bundle(bundle).router_kind == "adapted"
    assert verify_bundle(bundle).ok
    model = massmerge.load(bundle)
    assert model.predict("win a prize")[0].task in model.tasks
    assert model.route("win")[0].residuals == massmerge.load(bundle, router="adapted").route("win")[0].residuals


def test_inputs_of_known_task_decide_where_there_are_some(bundle):
    before = contents(bundle)
    done = adapt(bundle, MIXED, check=inputs(6, seed=3))
    assert done.judged_by == "names"
    assert (done.way is None) == (max(done.tried.values()) <= done.before)
    assert (contents(bundle) == before) == (done.way is None)


def test_too_few_inputs_are_refused(bundle):
    with pytest.raises(InputError, match="29 inputs are too few"):
        adapt(bundle, MIXED[:29])


def test_the_reservoir_of_another_bundle_is_refused(bundle, tmp_path):
    save_file({"x": torch.zeros(40, 3)}, tmp_path / "kept.safetensors")
    with pytest.raises(InputError, match="not the reservoir of a service with this bundle"):
        adapt(bundle, tmp_path / "kept.safetensors")


def test_kept_inputs_that_are_no_numbers_are_left_out(bundle, tmp_path, agreeing):
    model = massmerge.load(bundle)
    looks = [look for look in (model.stages.first, model.stages.second) if look is not None]
    kept = {v.name: torch.randn(40, v.site.width) for look in looks for v in look.voters}
    kept[looks[0].voters[0].name][3] = torch.inf
    save_file(kept, tmp_path / "kept.safetensors")
    assert adapt(bundle, tmp_path / "kept.safetensors").inputs == 39


def test_a_router_that_is_no_numbers_is_not_written(bundle):
    before = contents(bundle)
    fitted = FittedRouter("linear", {"linear.weight": torch.tensor([1.0, torch.nan])})
    with pytest.raises(InputError, match="NaN or infinity, so the bundle stays as it is"):
        replace_router(bundle, lambda path: (None, fitted))
    assert contents(bundle) == before


def test_images_are_adapted_to_with_both_looks(root, tmp_path, monkeypatch, agreeing):
    monkeypatch.setattr(adapting, "LEAST", 10)
    bundle = with_options(
        image_bundle(root), tmp_path / "bundle", router={"token": "both"}
    )  # or one voter of two blocks
    images = vit_images(massmerge.load(bundle))
    done = adapt(bundle, images)
    model = massmerge.load(bundle)
    assert (done.inputs, Bundle(bundle).router_kind) == (12, "adapted")
    assert (model.stages.second is None) == (massmerge.load(bundle, router="projection").stages.second is None)
    assert len(model.predict(images[:3])) == 3


def test_the_command_says_what_was_tried(bundle, tmp_path, agreeing):
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in MIXED))
    found = CliRunner().invoke(main, ["adapt", str(bundle), str(path), "--column", "text", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["inputs"] == 36
    assert CliRunner().invoke(main, ["adapt", str(bundle), str(tmp_path / "nothing.txt")]).exit_code == 2
