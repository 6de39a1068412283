"""The probability that task and label are right, against what is obviously right."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from massmerge.routing.confidence import (
    TEXTS,
    fit_confidence,
    label_confidence,
    lead_log_odds,
    least_confidence,
    refit,
    strengths,
    task_probabilities,
)

STRONG = st.lists(st.floats(-8, 8), min_size=2, max_size=20)


def naive_log_odds(strong, chosen):
    parts = [math.exp(value) for value in strong]
    p = parts[chosen] / sum(parts)
    return math.log(p / (1 - p))


@given(STRONG)
def test_the_lead_is_the_log_odds_of_a_softmax(strong):
    found = lead_log_odds(strong, 0)
    assert found == pytest.approx(max(-12, min(12, naive_log_odds(strong, 0))), abs=1e-6)


@given(STRONG)
def test_probabilities_of_tasks_add_up_to_one(strong):
    best = max(range(len(strong)), key=strong.__getitem__)
    found = task_probabilities(strong, best, TEXTS)
    assert sum(found) == pytest.approx(1)
    assert all(0 <= p <= 1 for p in found)


def test_one_task_is_certain():
    assert task_probabilities([0.3], 0, TEXTS) == [1.0]


def test_the_same_lead_over_more_tasks_is_worth_less():
    few, many = (task_probabilities([3.0, *[0.0] * rivals], 0, TEXTS)[0] for rivals in (1, 19))
    assert many < few


def test_probabilities_of_a_router_are_taken_as_they_are():
    scores = -torch.tensor([[0.7, 0.2, 0.1]]).log()
    rule = TEXTS.of_probabilities()
    found = task_probabilities(strengths([scores], probable=True)[0].tolist(), 0, rule)
    assert found == pytest.approx([0.7, 0.2, 0.1], abs=1e-6)


def test_voters_that_agree_are_surer_than_voters_that_do_not():
    one, other = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[1.0, 0.0, 2.0]])
    both, half = (strengths(scores)[0].tolist() for scores in ([one, one, one], [one, one, other]))
    assert lead_log_odds(both, 0) > lead_log_odds(half, 0) > 0


def test_a_head_that_is_surer_is_more_often_right_and_never_certain():
    found = [label_confidence(p, TEXTS) for p in (0.5, 0.9, 0.9999, 1.0)]
    assert found == sorted(found)
    assert found[-1] < 1


def test_a_fit_finds_the_constants_that_made_the_answers():
    draw = torch.Generator().manual_seed(0)
    evidence = 6 * torch.rand(20_000, generator=draw) - 2
    right = torch.rand(20_000, generator=draw) < torch.sigmoid(0.5 + 0.8 * evidence)
    assert fit_confidence(evidence, right) == pytest.approx((0.5, 0.8), abs=0.08)


def test_a_few_inputs_that_were_all_right_move_the_rule_only_a_little():
    found = refit(TEXTS, torch.full((8,), 3.0), torch.ones(8))
    assert found.lead == pytest.approx(TEXTS.lead, abs=0.3)
    assert (found.label, found.label_offset) == (TEXTS.label, TEXTS.label_offset)


def naive_least(confidences, right, precision):
    passing = [
        limit
        for limit in confidences
        if sum(r for c, r in zip(confidences, right, strict=True) if c >= limit)
        >= precision * sum(c >= limit for c in confidences)
    ]
    return min(passing, default=None)


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.5, 0.7, 0.9]), st.booleans()), min_size=1, max_size=30),
       st.sampled_from([0.5, 0.8, 1.0]))  # fmt: skip
def test_the_least_confidence_for_a_precision_is_the_least_of_all_that_reach_it(answers, precision):
    confidences, right = zip(*answers, strict=True)
    assert least_confidence(confidences, right, precision) == naive_least(confidences, right, precision)
