"""Every answer says how probable it is that task and label are both right."""

import json

import pytest
import torch

import massmerge
from answers import bert_rows
from massmerge.bundle.layout import MANIFEST
from massmerge.bundle.manifest import read_manifest, sign_manifest
from massmerge.model.answers import Routing, make_prediction
from massmerge.recipe import AnswerOptions
from massmerge.routing.confidence import IMAGES, TEXTS, label_confidence
from massmerge.serve.metrics import Metrics
from models import FAMILIES, family_bundle, rows_of, with_options


def answer_of(values, problem="single_label_classification", probabilities=None):
    routing = Routing({"a": 0.0}, {"a": 1.0}, ["a"], "M0.mean", probabilities=probabilities or {})
    labels = {"a": tuple(f"l{i}" for i in range(len(values)))}
    return make_prediction({"a": torch.tensor(values)}, labels, {"a": problem}, {"a": 1.0}, AnswerOptions(), 3, routing)


def test_confidence_is_that_of_the_task_times_that_of_the_label(bert):
    for one in bert.predict(bert_rows()):
        task, label = one.routing.probabilities[one.task], label_confidence(one.score, TEXTS)
        assert one.confidence == pytest.approx(task * label)
        assert sum(one.routing.probabilities.values()) == pytest.approx(1)


def test_with_the_task_given_confidence_is_the_heads_part(bert):
    for one in bert.predict(bert_rows(), task="a"):
        assert one.confidence == pytest.approx(label_confidence(one.score, TEXTS))


def test_several_labels_are_right_if_each_is():
    found = answer_of([3.0, -2.0], "multi_label_classification", {"a": 0.5})
    parts = [label_confidence(torch.tensor(v).sigmoid().item(), TEXTS) for v in (3.0, 2.0)]
    assert found.confidence == pytest.approx(0.5 * parts[0] * parts[1])


def test_of_a_number_only_the_task_can_be_right():
    assert answer_of([3.0], "regression", {"a": 0.4}).confidence == pytest.approx(0.4)


def test_an_answer_below_the_limit_is_that_of_no_task(bert):
    rows = bert_rows()
    free = bert.predict(rows)
    limit = sorted(one.confidence for one in free)[1]
    found = bert.predict(rows, unknown={"confidence": limit})
    assert [one.task for one in found] == [one.task if one.confidence >= limit else None for one in free]
    assert [one.confidence for one in found] == [one.confidence for one in free]
    assert not found[[one.task for one in found].index(None)].routing.selected


def test_a_task_that_is_given_answers_whatever_the_limit(bert):
    assert all(one.task == "a" for one in bert.predict(bert_rows(), task="a", unknown={"confidence": 1.0}))


def test_constants_in_the_bundle_replace_the_data_free_ones(root, tmp_path):
    bundle = with_options(family_bundle(root, "bert"), tmp_path / "bundle")
    manifest = {k: v for k, v in read_manifest(bundle).items() if k != "sha256"}
    sign_manifest(bundle, {**manifest, "confidence": {"projection": {"offset": -50.0, "lead": 0.0}}})
    model = massmerge.load(bundle)
    assert all(one.confidence < 1e-9 for one in model.predict(bert_rows()))


def test_constants_that_are_no_numbers_are_refused(root, tmp_path):
    bundle = with_options(family_bundle(root, "bert"), tmp_path / "bundle")
    manifest = json.loads((bundle / MANIFEST).read_text())
    sign_manifest(bundle, {k: v for k, v in manifest.items() if k != "sha256"} | {"confidence": {"projection": "high"}})
    with pytest.raises(massmerge.InputError, match="confidence"):
        massmerge.load(bundle)


def test_the_service_counts_confidences_and_unclear_answers():
    metrics = Metrics()
    metrics.count([massmerge.Prediction("a", "x", confidence=c) for c in (0.2, 0.97)] + [massmerge.Prediction(None)])
    text = metrics.text().decode()
    assert "mass_confidence_count 2.0" in text
    assert 'mass_confidence_bucket{le="0.95"} 1.0' in text
    assert "mass_unclear_total 2.0" in text


def test_images_have_constants_of_their_own(root, bert):
    image = massmerge.load(family_bundle(root, "vit"))
    (one,) = image.predict([rows_of(FAMILIES["vit"].make_inputs(1))[0]], task=image.tasks[0])
    assert one.confidence == pytest.approx(label_confidence(one.score, IMAGES))
    assert image.stages.rule == IMAGES and bert.stages.rule == TEXTS
