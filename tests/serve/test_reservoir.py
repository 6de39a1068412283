"""A service's sample of what its voters see: bounded, fair, and of use to `mass adapt`."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

import massmerge
import massmerge.model.adapt as adapting
from answers import vit_images
from massmerge.model.adapt import adapt
from massmerge.serve.reservoir import Reservoir
from models import image_bundle, text_bundle, with_options

TEXTS = [
    f"{word} {other}" for word in ["win", "free", "prize", "now", "call"] for other in ["team", "law", "vote", "sad"]
]


def watched(bundle, reservoir):
    """A loaded bundle whose routed inputs are shown to a reservoir."""
    return massmerge.load(bundle).watched(reservoir)


def test_no_more_inputs_are_kept_than_asked_for_and_written_once_due(root, tmp_path):
    now = [0.0]
    kept = Reservoir(tmp_path / "kept.safetensors", 8, every=60, clock=lambda: now[0])
    model = watched(text_bundle(root), kept)
    model.predict(TEXTS)
    assert len(kept) == 8
    assert not (tmp_path / "kept.safetensors").exists()
    now[0] = 61.0
    model.predict(TEXTS * 3)
    found = load_file(tmp_path / "kept.safetensors")
    assert {name: tensor.shape[0] for name, tensor in found.items()} == dict.fromkeys(model.voters, 8)


def test_what_is_kept_is_what_voters_see(root, tmp_path):
    kept = Reservoir(tmp_path / "kept.safetensors", 100)
    model = watched(text_bundle(root), kept)
    model.predict(TEXTS)
    kept.write()
    for tensor, seen in zip(load_file(tmp_path / "kept.safetensors").values(), model.activations(TEXTS), strict=True):
        assert sorted(tensor[:, 0].tolist()) == pytest.approx(sorted(seen[:, 0].tolist()), abs=2e-3)


def test_an_input_whose_task_is_given_is_not_kept(root, tmp_path):
    kept = Reservoir(tmp_path / "kept.safetensors", 8)
    watched(text_bundle(root), kept).predict(TEXTS, task="spam")
    assert len(kept) == 0


def test_every_input_has_the_same_chance():
    counts = torch.zeros(40)
    for seed in range(300):
        reservoir = Reservoir(None, 10, seed=seed)
        places = {}
        for start in (0, 7, 20):  # batches of several sizes
            size = {0: 7, 7: 13, 20: 20}[start]
            places |= {place: start + row for place, row in reservoir._places(size).items()}
        assert sorted(places) == list(range(10))
        counts[list(places.values())] += 1
    assert counts.min() > 45
    assert counts.max() < 108  # 75 expected, with a standard deviation of 7.5


def test_mass_adapt_takes_what_was_kept(root, tmp_path, monkeypatch):
    monkeypatch.setattr(adapting, "LEAST", 10)
    monkeypatch.setattr(adapting, "better", lambda before, after, tasks: True)
    image = with_options(
        image_bundle(root), tmp_path / "voters", router={"token": "both"}
    )  # or one voter of two blocks
    for name, bundle in (("text", text_bundle(root)), ("image", image)):
        kept = Reservoir(tmp_path / f"{name}.safetensors", 16)
        model = watched(bundle, kept)
        model.predict(TEXTS if name == "text" else vit_images(model))
        kept.write()
        copy = shutil.copytree(bundle, tmp_path / name)
        assert adapt(copy, tmp_path / f"{name}.safetensors").inputs == len(kept)
        assert massmerge.Bundle(copy).router_kind == "adapted"
