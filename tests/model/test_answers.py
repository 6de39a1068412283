"""The best label over several heads."""

from collections import Counter

import numpy as np
import pytest
import torch

import massmerge
from answers import bert_rows
from massmerge import InputError
from massmerge.model.answers import rank_answers
from massmerge.recipe import AnswerOptions
from models import family_bundle, logits_of, with_options


def two_heads(score, weights=None, weight=1.0, top=9):
    values = {"sure": torch.tensor([4.0, 0.0]), "loud": torch.tensor([5.0, 4.9, 4.8])}
    labels = {"sure": ("s0", "s1"), "loud": ("l0", "l1", "l2")}
    options = AnswerOptions(score=score, weight=weight)
    problems = dict.fromkeys(values, "single_label_classification")
    return rank_answers(values, labels, problems, weights or {"sure": 0.5, "loud": 0.5}, options, top)


def test_by_logit_the_highest_logit_over_all_heads_wins():
    assert [a.label for a in two_heads("logit")] == ["l0", "l1", "l2", "s0", "s1"]


def test_by_probability_the_head_that_is_surest_wins():
    assert two_heads("probability")[0].label == "s0"


def test_by_logit_and_weight_the_router_has_a_say():
    weights = {"sure": 0.9, "loud": 0.1}
    assert two_heads("logit_and_weight", weights)[0].label == "s0"
    assert two_heads("logit_and_weight", weights, weight=0.0)[0].label == "l0"
    by = {a.label: a.logit + np.log(weights[a.task]) for a in two_heads("logit_and_weight", weights)}
    assert list(by.values()) == sorted(by.values(), reverse=True)


def test_the_score_of_an_answer_is_its_probability_within_its_head():
    found = {a.label: a.score for a in two_heads("logit")}
    assert abs(sum(found[label] for label in ("l0", "l1", "l2")) - 1) < 1e-6
    assert abs(found["s0"] - float(torch.tensor([4.0, 0.0]).softmax(0)[0])) < 1e-6


def test_no_more_answers_are_given_than_asked_for():
    assert len(two_heads("logit", top=2)) == 2


def test_the_recipe_says_how_heads_are_compared(root, tmp_path):
    rows, chosen = bert_rows(6), []
    for score in ("logit", "probability"):
        folder = tmp_path / score
        router = {"top_k": 3, "threshold": 0.0}
        with_options(family_bundle(root, "bert"), folder, router=router, answer={"score": score})
        chosen.append(massmerge.load(folder).predict(rows, top=99))
    for by_logit, by_probability in zip(*chosen, strict=True):
        assert by_logit.logit == max(logits_of(by_logit).values())
        others = [a.score for a in by_probability.alternatives]
        assert by_probability.score >= max(others)


def test_alternatives_come_from_all_heads_of_the_set(root, tmp_path):
    options = {"top_k": 3, "threshold": 0.0}
    model = massmerge.load(with_options(family_bundle(root, "bert"), tmp_path / "bundle", router=options))
    found = model.predict(bert_rows(1), top=99)[0]
    assert Counter(task for task, _ in logits_of(found)) == {"a": 2, "b": 3, "c": 4}


def test_top_is_the_number_of_answers_with_the_best_one(bert):
    assert [len(bert.predict(bert_rows(1), task="c", top=n)[0].alternatives) for n in (1, 2, 3)] == [0, 1, 2]


@pytest.mark.parametrize("wrong", [{"top": 0}, {"batch_size": 0}])
def test_numbers_below_1_are_refused(bert, wrong):
    with pytest.raises(InputError, match="at least 1"):
        bert.predict(bert_rows(1), **wrong)
