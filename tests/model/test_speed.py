"""Everything that makes answers faster, against the same bundles the plain way."""

import pytest
import torch

import massmerge
from answers import assert_same_answers, vit_images
from massmerge.model.second_pass.modules import SubspacePatches
from massmerge.model.speed import packed, parallel
from massmerge.model.speed.packed import PackedLinear, PackedPatches
from models import FAMILIES, family_bundle, rows_of

FAST = (PackedLinear, PackedPatches, SubspacePatches)


@pytest.fixture
def at_once(monkeypatch):
    """Every trick from the first input on, however small the model."""
    monkeypatch.setattr(packed, "_LEAST_VALUES", 1)
    monkeypatch.setattr(packed, "_USES", 0)
    monkeypatch.setattr(parallel, "_LEAST", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def answered(bundle, name):
    """A model that has answered often enough for every trick, what it answered, and which of them it used."""
    model = massmerge.load(bundle, cache="64MB")
    inputs = vit_images(model) if name == "vit" else rows_of(FAMILIES[name].make_inputs(12))
    for _ in range(5):
        found = model.predict(inputs)
    used = {
        "layers": any(isinstance(m, FAST) for m in model.sets.second_pass.model.modules()),
        "cache": model.sets.cache.held_bytes > 0,
        "first token": any(layer.first_only for layer in model.sets.second_pass.layers().values()),
        "threads": len(parallel.parts_of(12, torch.device("cpu"))) > 1,
    }
    return found, used


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_the_plain_way_gives_the_same_answers(root, name, at_once, monkeypatch):
    bundle = family_bundle(root, name)
    fast, used = answered(bundle, name)
    assert all(used.values()), used
    monkeypatch.setenv("MASS_PLAIN", "1")
    plain, used = answered(bundle, name)
    assert not any(used.values()), used
    assert_same_answers(fast, plain)
