"""The row of a study that is MASS is what `mass eval` says of the same bundle on the same rows, however it routes."""

import pytest
import torch
import yaml
from PIL import Image

import massmerge
from massmerge.evaluation.prepared import prepare_evaluation
from massmerge.model.calibrate import calibrate
from massmerge.research.studies.run import run_studies
from massmerge.research.studies.settings import StudySettings
from models import image_bundle, with_options
from study_suite import study_bundle, write_study_suite

ROUTING, ANSWERS = ("layers", "routers", "redundancy"), ("sweep", "ablation", "batch")


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return write_study_suite(tmp_path_factory.mktemp("suite"))


def fixed(root, folder, suite):
    """The paper's first pass, another score, and heads that decide on nearly all inputs."""
    bundle = study_bundle(root)
    recipe = yaml.safe_load((bundle.parent / "recipe.yaml").read_text())
    recipe["merge"] = {"rank": 12, "redundancy": {"threshold": 0.02}}
    recipe["router"] = {"first_pass": "fixed", "score": "l1", "candidates": 3, "unsure": 1.5, "threshold": 0.34}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    return massmerge.merge(folder / "recipe.yaml", folder / "bundle", folder=bundle.parent)


def several(root, folder, suite):
    """Sets of two tasks by a threshold that is on no grid, and inputs that belong to no task."""
    options = {"router": {"top_k": 2, "threshold": 0.22, "score": "energy"}, "unknown": {"agreement": 0.6, "lift": 0.8}}
    return with_options(study_bundle(root), folder / "bundle", answer={"score": "probability"}, **options)


def calibrated(root, folder, suite):
    """A router that was fitted."""
    bundle = with_options(study_bundle(root), folder / "bundle")
    ready = prepare_evaluation(bundle, suite, split="validation", limit=4)
    for data in ready.data.values():
        data.read_inputs()
    inputs = {task: [data.inputs[i] for i in range(len(data))] for task, data in ready.data.items()}
    calibrate(bundle, inputs, kind="prototype")
    return bundle


def evaluated(bundle, suite):
    """Routing and answers of `mass eval`, their means over the tasks."""
    found = massmerge.evaluate(bundle, suite, oracle=False)
    return found.means["routing"].value, found.means["shared"].value


def mass_values(bundle, suite, out, names, monkeypatch):
    """What studies say of MASS."""
    monkeypatch.setattr("massmerge.research.studies.result.write_report", lambda *args: None)
    results = [run_studies(name, suite, out, bundle=bundle, settings=StudySettings(quick=True))[0] for name in names]
    return {result.study.name: result.finding.verdict.mass_value for result in results}


@pytest.mark.parametrize("make", [fixed, several, calibrated])
def test_what_a_study_calls_mass_is_what_an_evaluation_of_the_bundle_finds(make, root, suite, tmp_path, monkeypatch):
    bundle = make(root, tmp_path, suite)
    routing, answers = evaluated(bundle, suite)
    assert (routing, answers) != evaluated(study_bundle(root), suite), "or nothing is shown"
    found = mass_values(bundle, suite, tmp_path / "out", (*ROUTING, *ANSWERS), monkeypatch)
    expected = {**dict.fromkeys(ROUTING, routing), **dict.fromkeys(ANSWERS, answers)}
    assert found == {name: pytest.approx(value) for name, value in expected.items()}


def test_images_that_are_looked_at_again_and_settled_by_heads_are_so_in_studies(root, tmp_path, monkeypatch):
    bundle = with_options(image_bundle(root), tmp_path / "bundle", router={"unsure": 9.0, "confidence": 100.0})
    random = torch.Generator().manual_seed(3)
    for task, labels in massmerge.load(bundle).labels.items():
        for i in range(6):
            folder = tmp_path / task / labels[i % len(labels)]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(0, 255, (32, 32, 3), generator=random, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    suite = tmp_path / "suite.yaml"
    suite.write_text("tasks:\n  a: {folder: a}\n  b: {folder: b}\n")
    alone = with_options(bundle, tmp_path / "alone", router={"candidates": 1})
    routing, answers = evaluated(bundle, suite)
    assert routing != evaluated(alone, suite)[0], "or heads decide nothing"
    found = mass_values(bundle, suite, tmp_path / "out", ("layers", "redundancy", *ANSWERS), monkeypatch)
    assert [found["layers"], found["redundancy"]] == [pytest.approx(routing)] * 2
    assert [found[name] for name in ANSWERS] == [pytest.approx(answers)] * 3
