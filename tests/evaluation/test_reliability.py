"""What confidences are worth, against obvious loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from massmerge.evaluation.reliability import auroc, reliability

ANSWERS = st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.sampled_from("ab")), min_size=1, max_size=40)


def naive_error(answers):
    total = 0.0
    tasks = {task for _, _, task in answers}
    weight = {task: 1 / len(tasks) / sum(t == task for _, _, t in answers) for task in tasks}
    for place in range(10):
        own = [a for a in answers if min(int(a[0] * 10), 9) == place]
        sure = sum(weight[t] * c for c, _, t in own)
        hits = sum(weight[t] * r for _, r, t in own)
        total += abs(sure - hits)
    return total


@given(ANSWERS)
def test_the_calibration_error_is_the_mean_difference_over_bins_with_tasks_counting_alike(answers):
    found = reliability(*map(list, zip(*answers, strict=True)))
    assert found.calibration_error == pytest.approx(naive_error(answers), abs=1e-9)
    assert sum(one.rows for one in found.bins) == len(answers)


def test_the_surest_answers_are_counted_first():
    found = reliability([0.9, 0.8, 0.7, 0.6], [True, True, False, False], ["a"] * 4, reference=0.8)
    assert found.accuracy_at["50%"] == 1.0
    assert found.accuracy_at["100%"] == 0.5
    assert found.normalised_at["100%"] == pytest.approx(0.625)


def test_perfect_confidence_has_no_error():
    assert reliability([1.0, 0.0], [True, False], ["a", "b"]).calibration_error == 0.0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_auroc_is_the_share_of_pairs_that_stand_in_the_right_order(known, foreign):
    pairs = [1.0 if k > f else 0.5 if k == f else 0.0 for k in known for f in foreign]
    assert auroc(np.array(known, float), np.array(foreign, float)) == pytest.approx(np.mean(pairs))
