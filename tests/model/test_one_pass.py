"""Answers of one pass: the router's choice of head, on the base's own features."""

import pytest
import torch

import massmerge
from answers import vit_images
from golden.make import inputs, place
from massmerge.errors import InputError
from models import FAMILIES, write_family

BERT = FAMILIES["bert"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return massmerge.load(massmerge.merge(write_family(folder, "bert", {"a": 2, "b": 3}), folder / "out", workers=1))


def texts(count=24):
    """Texts of different lengths, so that they run in groups."""
    ids = BERT.make_inputs(count)["input_ids"].repeat(1, 4)
    return [{"input_ids": row[: 3 + i]} for i, row in enumerate(ids)]


def base_logits(model, item, task):
    """The naive twin: a forward pass of the base alone, then the task's head."""
    inputs = {"input_ids": item["input_ids"][None], "attention_mask": torch.ones(1, len(item["input_ids"])).long()}
    with torch.inference_mode():
        return model.core.heads[task](model.core.base(**inputs), inputs)[0]


@pytest.mark.parametrize("task", [None, "b"])
def test_heads_read_the_base_s_output(model, task):
    for item, found in zip(texts(), model.predict(texts(), task=task, passes=1, top=1), strict=True):
        wanted = base_logits(model, item, found.task)
        assert found.logit == pytest.approx(float(wanted.max()), abs=1e-4)
        assert found.label == model.labels[found.task][int(wanted.argmax())]


def test_the_tasks_are_those_of_two_passes(model):
    once, twice = model.predict(texts(), passes=1), model.predict(texts())
    assert [p.task for p in once] == [p.task for p in twice]
    for a, b in zip(once, twice, strict=True):
        assert a.routing.residuals == pytest.approx(b.routing.residuals, abs=1e-5)
    assert once[0].timings["second pass"] == 0.0


@pytest.mark.parametrize("route", ["input", "batch"])
def test_images_that_are_looked_at_again_are_routed_as_with_two_passes(load_vit, route):
    model = load_vit(unsure=0.5, candidates=1)
    images = vit_images(model)
    once, twice = (model.predict(images, passes=n, route=route) for n in (1, 2))
    assert [p.task for p in once] == [p.task for p in twice]


def test_candidates_of_an_unclear_image_are_compared_without_another_pass(load_vit):
    model = load_vit(unsure=9.0, candidates=2, confidence=50.0)
    images = vit_images(model)
    both = {task: model.predict(images, task=task, passes=1) for task in model.tasks}
    for i, found in enumerate(model.predict(images, passes=1)):
        assert found.label == both[found.task][i].label


def test_outcomes_of_one_pass_are_its_answers_without_and_with_the_task(model):
    tasks = ["a", "b"] * 12
    for i, (free, given) in enumerate(model.outcomes(texts(), tasks, passes=1)):
        assert free.label == model.predict([texts()[i]], passes=1)[0].label
        assert given.task == tasks[i]
        assert given.logit == pytest.approx(float(base_logits(model, texts()[i], tasks[i]).max()), abs=1e-4)


def test_a_first_pass_of_another_model_is_refused():
    model = massmerge.load(place("image"))  # of the paper's setting, whose first pass runs the fixed model
    assert not model.answers_at_once
    with pytest.raises(InputError, match="passes=1 answers with the base's features"):
        model.predict(inputs("image"), passes=1)


def test_other_numbers_of_passes_are_refused(model):
    with pytest.raises(InputError, match="passes is 1 or 2, not 3"):
        model.predict(texts(1), passes=3)
