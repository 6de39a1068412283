"""Stored bundles of every released format: today's reader opens them, and today's writer has not changed the format."""

import json
from pathlib import Path

import pytest

import massmerge
from golden.make import HERE, KINDS, TASKS, answers, inputs, layout, make, place
from massmerge.bundle.layout import FORMAT_VERSION
from massmerge.bundle.manifest import find_damage, read_manifest

STORED = sorted(path.with_suffix("") for path in HERE.glob("*/*.json"))


def said(path: Path) -> dict:
    return json.loads(path.with_suffix(".json").read_text())


def test_every_kind_is_stored_in_the_format_that_describes_it():
    assert {path.parent.name for path in STORED} == {str(v) for v in range(1, FORMAT_VERSION + 1)}
    assert {*STORED} == {place(kind) for kind in KINDS}


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_stored_bundle_states_its_format(path):
    """A reader of format 1 refuses what it would misread, and opens all else."""
    assert read_manifest(path)["format_version"] == int(path.parent.name)


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_stored_bundle_is_whole_and_answers_as_it_did(path):
    assert find_damage(path, read_manifest(path)) == []
    for found, expected in zip(answers(path.name, path), said(path)["answers"], strict=True):
        logit = expected.pop("logit", None)
        assert found.pop("logit", None) == pytest.approx(logit, abs=1e-3)
        assert found == expected


@pytest.mark.parametrize("path", [p for p in STORED if p.name != "static"], ids=lambda path: path.name)
def test_a_stored_bundle_routes(path):
    routings = massmerge.load(path).route(inputs(path.name))
    assert all(set(r.residuals) == {*TASKS} and r.selected for r in routings)


@pytest.mark.parametrize("kind", KINDS)
def test_the_format_changes_only_with_its_number(kind, tmp_path):
    """Where this fails, raise `FORMAT_VERSION`, keep the old reader, and run `tests/golden/make.py`."""
    assert layout(make(kind, tmp_path)) == said(place(kind))["layout"]
