"""Unclear images are answered by several tasks, against asking each of them by name."""

import math
import re

import pytest

from answers import vit_images
from massmerge.cli.explain import describe
from massmerge.model.answers import Prediction, Routing
from massmerge.model.explain import explain
from massmerge.model.route.candidates import certainty, settle, spread


def naive(model, image, count, limit, confidence):
    """The router's best tasks, each asked by name, and the one of which lead and head together are the best."""
    routing = model.route([image])[0]
    if routing.margin >= limit:
        return model.predict([image], task=routing.selected[0])[0]
    voters = len(routing.site.split())
    tasks = sorted(routing.residuals, key=routing.residuals.get)[:count]
    answers = {task: model.predict([image], task=task)[0] for task in tasks}

    def rank(task):
        odds = answers[task].score / (1 - answers[task].score)
        return routing.residuals[task] / voters - confidence * math.log(odds) / 10

    return answers[min(tasks, key=rank)]


@pytest.mark.parametrize("confidence", [0.0, 0.5, 50.0])
def test_an_unclear_image_gets_the_best_of_its_candidates_answers(load_vit, confidence):
    model = load_vit(candidates=2, confidence=confidence)
    images = vit_images(model)
    limit = sum(sorted(r.margin for r in model.route(images))[5:7]) / 2  # between two, so that rounding decides nothing
    model = load_vit(unsure=limit, candidates=2, confidence=confidence)
    found = model.predict(images)
    expected = [naive(model, image, 2, limit, confidence) for image in images]
    assert [(p.task, p.label) for p in found] == [(p.task, p.label) for p in expected]
    assert [p.score for p in found] == pytest.approx([p.score for p in expected], abs=1e-4)
    asked = [len(p.routing.confidences) for p in found]
    assert set(asked) == {0, 2} and all(p.routing.selected == [p.task] for p in found)
    assert all(p.timings["inputs"] == len(images) for p in found)


def test_confidence_can_change_the_task_and_none_cannot(load_vit):
    images = vit_images(load_vit())
    first = [r.selected for r in load_vit(unsure=9.0).route(images)]
    changed = [
        [p.task] != one for p, one in zip(load_vit(unsure=9.0, confidence=50.0).predict(images), first, strict=True)
    ]
    assert any(changed)
    assert [[p.task] for p in load_vit(unsure=9.0, confidence=0.0).predict(images)] == first
    assert [[p.task] for p in load_vit(unsure=9.0, confidence=50.0, candidates=1).predict(images)] == first


def test_an_answer_does_not_depend_on_the_others_in_the_batch(load_vit):
    model = load_vit(unsure=0.5)
    images = vit_images(model)
    alone = [model.predict([image])[0] for image in images]
    assert [(p.task, p.label) for p in model.predict(images)] == [(p.task, p.label) for p in alone]


def test_answers_to_compare_methods_by_are_those_of_predict(load_vit):
    model = load_vit(unsure=0.5, confidence=50.0)
    images = vit_images(model)
    free = [answer for answer, _ in model.outcomes(images, [model.tasks[0]] * len(images))]
    assert [(p.task, p.label) for p in free] == [(p.task, p.label) for p in model.predict(images)]


@pytest.mark.parametrize(("router", "count"), [({}, 4), ({"site": "M0"}, 1), ({"top_k": 2}, 1), ({"candidates": 2}, 2)])
def test_several_tasks_answer_images_that_are_looked_at_again(load_vit, router, count):
    assert load_vit(**router).stages.candidates == count


def test_a_decision_for_a_batch_a_set_and_an_abstention_have_no_candidates(load_vit):
    model = load_vit(unsure=9.0)
    assert not any(p.routing.confidences for p in model.predict(vit_images(model), route="batch"))
    one = Routing({"a": 1.0, "b": 2.0}, {}, [], "M0.cls", margin=0.0)
    two = Routing({"a": 1.0, "b": 2.0}, {}, ["a", "b"], "M0.cls", margin=0.0)
    assert spread([one, two], 1.0, 3) == [(0, one), (1, two)]


def test_an_explanation_says_that_several_tasks_answered(load_vit):
    model = load_vit(unsure=9.0)
    text = describe(explain(model, vit_images(model)[0]))
    assert re.search(
        r"unclear, so several tasks answered; confidence of their heads: (\w+ 0\.\d\d(, )?){3}$", text, re.M
    )


def test_certainty_grows_with_the_probability_also_where_that_is_almost_one():
    found = [certainty(p) for p in (0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 0.99995, 1.0)]
    assert found == sorted(found) and found[0] == -1.0 and found[2] == 0.0 and found[-1] == 1.0
    assert found[4] == pytest.approx(math.log(99) / 10)


def test_a_head_that_gives_a_number_has_no_confidence():
    routing = Routing({"class": 1.0, "number": 0.9}, {}, ["number"], "M0.cls", margin=0.0)
    asked = [
        (0, Prediction("number", "n", logit=7.0, value=7.0, routing=routing)),
        (0, Prediction("class", "x", 0.9, 1.0, routing=routing)),
    ]
    (best,) = settle(asked, 0.5)
    assert best.task == "class" and best.routing.confidences == {"number": 0.0, "class": 0.9}
