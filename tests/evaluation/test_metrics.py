"""Figures against naive twins: obvious loops, known values, and another library."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from massmerge.evaluation.metrics import (
    Figure,
    Given,
    draw_rows,
    f1,
    interval,
    mean_over_tasks,
    own_label,
    shared_groups,
    spearman,
    statistic,
)
from massmerge.evaluation.results import FAILED, UNKNOWN, Confusion, RowResult, count_routes, count_sets
from massmerge.linalg.intervals import wilson

# Wilson's interval


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_that_of_newcombes_table(right, count, low, high):
    found = wilson(right, count)
    assert found.value == right / count
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_holds_the_share_and_mirrors_its_complement(pair):
    right, count = pair
    found, mirrored = wilson(right, count), wilson(count - right, count)
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0
    assert found.low == pytest.approx(1 - mirrored.high, abs=1e-12)


# F1


def naive_f1(truth, given, classes):
    scores = []
    for one in classes:
        both = missed = false = 0
        for t, g in zip(truth, given, strict=True):
            if t == one and g == one:
                both += 1
            elif t == one:
                missed += 1
            elif g == one:
                false += 1
        if both + missed + false == 0:
            continue
        precision = both / (both + false) if both + false else 0.0
        recall = both / (both + missed) if both + missed else 0.0
        scores.append(2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    return sum(scores) / len(scores) if scores else 0.0


_pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3)), min_size=1, max_size=40)


@given(_pairs)
def test_f1_is_the_mean_of_harmonic_means_of_precision_and_recall(pairs):
    truth, given_ = (np.array(side) for side in zip(*pairs, strict=True))
    assert f1(truth, given_, range(4)) == pytest.approx(naive_f1(truth, given_, range(4)))


def test_f1_of_one_class_is_known():
    # 2 hits, 1 false alarm, 1 miss: precision and recall are both 2/3.
    assert f1(np.array([1, 1, 1, 0]), np.array([1, 1, 0, 1]), [1]) == pytest.approx(2 / 3)


# Spearman


def naive_spearman(x, y):
    def ranks(values):
        return [sum(other < v for other in values) + (sum(other == v for other in values) + 1) / 2 for v in values]

    a, b = ranks(x), ranks(y)
    ma, mb = sum(a) / len(a), sum(b) / len(b)
    cov = sum((i - ma) * (j - mb) for i, j in zip(a, b, strict=True))
    va, vb = sum((i - ma) ** 2 for i in a), sum((j - mb) ** 2 for j in b)
    return cov / math.sqrt(va * vb) if va * vb else 0.0


_numbers = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=30)


@given(_numbers)
def test_spearman_is_the_correlation_of_ranks_ties_included(pairs):
    x, y = (np.array(side, dtype=float) for side in zip(*pairs, strict=True))
    assert spearman(x, y) == pytest.approx(naive_spearman(x.tolist(), y.tolist()), abs=1e-9)


def test_spearman_is_that_of_scipy():
    random = np.random.default_rng(3)
    x = random.normal(size=200)
    y = np.round(x + random.normal(size=200), 1)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)


@pytest.mark.parametrize(("x", "y"), [([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]), ([1.0], [2.0]), ([], [])])
def test_spearman_of_what_does_not_vary_is_nothing(x, y):
    assert spearman(np.array(x), np.array(y)) == 0.0


# Which labels count


def test_groups_that_overlap_are_one():
    groups = shared_groups([["a/x", "b/x"], ["c/y", "d/y"], ["b/x", "e/x"], ["e/x", "d/y"]])
    assert len(set(groups.values())) == 1
    assert shared_groups([["a/x", "b/x"], ["c/y", "d/y"]]) == {"a/x": 0, "b/x": 0, "c/y": 1, "d/y": 1}


@pytest.mark.parametrize(
    ("answer", "counts_as"),
    [
        (Given("mnist", "3"), "3"),
        (Given("mnist", "5"), "5"),
        (Given("usps", "3"), "3"),
        (Given("usps", "5"), None),
        (Given("usps", "4"), None),
        (Given("cifar", "3"), None),
        (Given(), None),
    ],
    ids=str,
)
def test_a_label_of_another_task_counts_only_where_it_means_the_true_one(answer, counts_as):
    groups = shared_groups([["mnist/3", "usps/3"], ["mnist/5", "usps/5"]])
    assert own_label("mnist", "3", answer, groups) == counts_as


def test_without_groups_the_label_alone_never_counts():
    assert own_label("mnist", "3", Given("usps", "3"), {}) is None


def test_two_labels_of_one_task_never_mean_the_same():
    groups = shared_groups([["pets/siamese", "pets/tabby", "animals/cat"]])
    assert own_label("pets", "siamese", Given("pets", "tabby"), groups) == "tabby"
    assert own_label("pets", "siamese", Given("animals", "cat"), groups) == "siamese"


# Metrics of a task

LABELS = ["x", "y", "z"]
_answers = st.one_of(
    st.just(Given()),
    st.builds(Given, st.sampled_from(["own", "other"]), st.sampled_from(LABELS), st.floats(-1, 1)),
)
_rows = st.lists(st.tuples(st.sampled_from(LABELS), _answers), min_size=1, max_size=30)


def everything(count):
    return np.arange(count)


@given(_rows)
def test_strict_accuracy_is_the_share_of_right_pairs(rows):
    truths, answers = zip(*rows, strict=True)
    right = 0
    for truth, answer in rows:
        if answer.task == "own" and answer.label == truth:
            right += 1
    assert statistic("accuracy", "own", truths, answers)(everything(len(rows))) == pytest.approx(right / len(rows))


@given(_rows)
def test_shared_accuracy_takes_the_other_tasks_label_too_and_is_never_less(rows):
    truths, answers = zip(*rows, strict=True)
    groups = shared_groups([["own/x", "other/x"], ["own/y", "other/y"]])
    right = 0
    for truth, answer in rows:
        if answer.label == truth and (answer.task == "own" or truth in "xy"):
            right += 1
    shared = statistic("accuracy", "own", truths, answers, groups)(everything(len(rows)))
    assert shared == pytest.approx(right / len(rows))
    assert shared >= statistic("accuracy", "own", truths, answers)(everything(len(rows)))


@given(_rows)
def test_f1_of_a_task_takes_answers_of_others_as_misses(rows):
    truths, answers = zip(*rows, strict=True)
    own = [answer.label if answer.task == "own" else "none" for answer in answers]
    expected = naive_f1(truths, own, LABELS)
    assert statistic("f1", "own", truths, answers)(everything(len(rows))) == pytest.approx(expected)
    positive = statistic("f1", "own", truths, answers, positive="y")(everything(len(rows)))
    assert positive == pytest.approx(naive_f1(truths, own, ["y"]))


def test_spearman_of_a_task_pays_for_rows_that_went_elsewhere():
    truths = ["1", "2", "3", "4"]
    right = [Given("own", "LABEL_0", value) for value in (0.1, 0.2, 0.3, 0.4)]
    assert statistic("spearman", "own", truths, right)(everything(4)) == pytest.approx(1.0)
    some = [*right[:3], Given("other", "x", 0.9)]
    assert statistic("spearman", "own", truths, some)(everything(4)) == pytest.approx(0.75)
    worse = [Given("own", "LABEL_0", value) for value in (0.3, 0.2, 0.1)] + [Given()]
    assert statistic("spearman", "own", truths, worse)(everything(4)) == pytest.approx(-1.0)
    assert statistic("spearman", "own", truths, [Given()] * 4)(everything(4)) == 0.0


# Intervals


def test_draws_are_of_all_rows_and_differ_from_task_to_task_but_not_from_run_to_run():
    first, again, other = (list(draw_rows(50, seed, 20)) for seed in ((0, 1), (0, 1), (0, 2)))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert set(np.concatenate(first)) == set(range(50))


@pytest.mark.parametrize("right", [300, 360])
def test_the_bootstraps_interval_of_an_accuracy_is_near_wilsons(right):
    hits = np.arange(400) < right
    drawn = np.array([hits[rows].mean() for rows in draw_rows(400, (0, 0))])
    found, expected = interval(right / 400, drawn), wilson(right, 400)
    assert found.low == pytest.approx(expected.low, abs=0.01)
    assert found.high == pytest.approx(expected.high, abs=0.01)


def test_a_mean_over_tasks_has_the_deviation_of_the_tasks_and_the_interval_of_the_rows():
    figures = [Figure(0.9, 0, 1), Figure(0.7, 0, 1), Figure(0.5, 0, 1)]
    drawn = [np.linspace(value - 0.1, value + 0.1, 1001) for value in (0.9, 0.7, 0.5)]
    mean = mean_over_tasks(figures, drawn)
    assert mean.value == pytest.approx(0.7)
    assert mean.deviation == pytest.approx(0.2)
    assert (mean.low, mean.high) == (pytest.approx(0.605), pytest.approx(0.795))


def test_one_task_has_no_deviation():
    assert mean_over_tasks([Figure(0.9, 0, 1)], [np.full(10, 0.9)]).deviation is None


# Routing


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["a", "b", "c", UNKNOWN, FAILED])), min_size=1))
def test_the_confusion_matrix_counts_every_row_once(pairs):
    rows = [
        RowResult(task, i, "x", Given(), (where,) if where in "abc" else (), error="no" if where == FAILED else None)
        for i, (task, where) in enumerate(pairs)
    ]
    found = count_routes(rows, ["a", "b"], ["a", "b", "c"])
    assert found.columns == ("a", "b", "c", UNKNOWN, FAILED)
    for task, counts in zip(found.tasks, found.counts, strict=True):
        assert sum(counts) == sum(t == task for t, _ in pairs)
        for where, count in zip(found.columns, counts, strict=True):
            assert count == sum(1 for pair in pairs if pair == (task, where))
    sizes = Counter("abc".count(where) for _, where in pairs if where != FAILED)
    assert count_sets(rows) == dict(sizes)


def test_the_worst_mistakes_go_by_their_share_of_the_tasks_rows():
    found = Confusion(("a", "b"), ("a", "b", UNKNOWN, FAILED), ((90, 9, 1, 0), (2, 7, 0, 1)))
    assert found.worst() == [
        ("b", "a", 2, 0.2), ("b", FAILED, 1, 0.1), ("a", "b", 9, 0.09), ("a", UNKNOWN, 1, 0.01),
    ]  # fmt: skip
    assert found.worst(1) == [("b", "a", 2, 0.2)]
