"""Figures from truths and answers: plain functions over arrays, each with a naive twin in the tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from massmerge.evaluation.suite import Metric, join_labels, label_set
from massmerge.linalg.intervals import Figure as Figure
from massmerge.model.answers import Prediction

DRAWS = 1000  # of the bootstrap; the ends of an interval are then good to about a tenth of its width

Rows = NDArray[np.int64]
Statistic = Callable[[Rows], float]
"""A figure of some of the rows; rows may be named several times, as a bootstrap does."""


class Given(NamedTuple):
    """An answer as far as it is scored; all are none where there was no answer."""

    task: str | None = None
    label: str | None = None
    """Of a multi-label head all that it gave, as `join_labels` writes them."""
    score: float | None = None
    """Of a head that gives a number, that number."""


def given_of(answer: Prediction) -> Given:
    """What is scored of a prediction."""
    label = answer.label if answer.labels is None else join_labels(answer.labels)
    return Given(answer.task, label, answer.score if answer.value is None else answer.value)


def plain_text(text: str) -> str:
    """A text as it is compared with another: capitals and the amount of white space do not matter."""
    return " ".join(text.split()).casefold()


def written(task: str | None, text: str | None) -> Given:
    """A text that was generated, as an answer: its label is the text, its score the number that it is, if it is one."""
    if text is None:
        return Given(task)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    return Given(task, plain_text(text), number if math.isfinite(number) else None)


# Labels that mean the same


def shared_groups(groups: Iterable[Iterable[str]]) -> dict[str, int]:
    """For each `task/label` of some groups the number of its group; groups that overlap are one."""
    joined: list[set[str]] = []
    for group in groups:
        names = set(group)
        touching = [old for old in joined if old & names]
        joined = [old for old in joined if not old & names] + [names.union(*touching)]
    return {name: number for number, group in enumerate(joined) for name in group}


def own_label(task: str, truth: str, given: Given, groups: Mapping[str, int]) -> str | None:
    """The label of its own task that an answer to a row amounts to; none if it is the answer of another task.

    A label of another task counts where it means the same as the true one. Two labels of one task never do.
    """
    if given.task == task or given.task is None:
        return given.label
    theirs = groups.get(f"{given.task}/{given.label}")
    return truth if theirs is not None and theirs == groups.get(f"{task}/{truth}") else None


# Figures


def f1(truth: Rows, given: Rows, classes: Sequence[int]) -> float:
    """The mean over classes of `2 TP / (2 TP + FP + FN)`; classes that occur nowhere are left out.

    Args:
        truth: class (n,) of each row.
        given: class (n,) of each answer, -1 where it is none of this task's.
        classes: the classes to take the mean over.
    """
    found = []
    for one in classes:
        hits = int(((truth == one) & (given == one)).sum())
        total = int((truth == one).sum() + (given == one).sum())
        if total:
            found.append(2 * hits / total)
    return float(np.mean(found)) if found else 0.0


def spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Spearman's rank correlation; 0 where one side does not vary."""
    if len(x) < 2:
        return 0.0
    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    length = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / length if length else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Places from 1, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def statistic(
    metric: Metric,
    task: str,
    truths: Sequence[str],
    given: Iterable[Given],
    groups: Mapping[str, int] | None = None,
    positive: str | None = None,
) -> Statistic:
    """A metric of one task as a function of rows.

    Args:
        metric: `accuracy`, `f1`, `micro_f1` or `spearman`.
        task: the task that the rows are of.
        truths: label of each row.
        given: answer to each row.
        groups: labels of other tasks that count as the true one (`shared_groups`); none for the strict figure.
        positive: for `f1` the label that it is of.
    """
    if metric == "spearman":
        return _spearman_statistic(task, truths, given)
    if metric == "micro_f1":
        return _micro_f1_statistic(task, truths, given, groups or {})
    own = [own_label(task, truth, answer, groups or {}) for truth, answer in zip(truths, given, strict=True)]
    if metric == "accuracy":
        hits = np.array([truth == label for truth, label in zip(truths, own, strict=True)])
        return lambda rows: float(hits[rows].mean())
    names = sorted({*truths, *(label for label in own if label is not None)})
    numbers = {name: number for number, name in enumerate(names)}
    truth = np.array([numbers[label] for label in truths])
    answer = np.array([-1 if label is None else numbers[label] for label in own])
    classes = range(len(names)) if positive is None else [numbers.get(positive, len(names))]
    return lambda rows: f1(truth[rows], answer[rows], classes)


def _micro_f1_statistic(
    task: str, truths: Sequence[str], given: Iterable[Given], groups: Mapping[str, int]
) -> Statistic:
    """`2 TP / (2 TP + FP + FN)` over all pairs (task, label) of the rows; every label of another task is one too many."""
    counts = np.zeros((len(truths), 2), dtype=np.int64)
    for row, (truth, answer) in enumerate(zip(truths, given, strict=True)):
        true, said = label_set(truth), label_set(answer.label)
        if answer.task == task:
            hits = len(true & said)
        else:
            theirs = {groups.get(f"{answer.task}/{label}") for label in said} - {None}
            hits = sum(groups.get(f"{task}/{label}") in theirs for label in true)
        counts[row] = 2 * hits, len(true) + len(said)

    def figure(rows: Rows) -> float:
        """F1 of some rows."""
        hits, total = counts[rows].sum(0).tolist()
        return hits / total if total else 0.0

    return figure


def _spearman_statistic(task: str, truths: Sequence[str], given: Iterable[Given]) -> Statistic:
    """The correlation over rows that were answered by their own task, times the share of those rows.

    An accuracy is the same product. A row that went elsewhere has no value to be ranked, and must not be left out for free.
    """
    truth = np.array([float(label) for label in truths])
    # What routes nothing names no task.
    own = (g.score if g.score is not None and g.task in (task, None) else math.nan for g in given)
    values = np.fromiter(own, dtype=float, count=len(truth))

    def figure(rows: Rows) -> float:
        """The correlation over some rows that have a number, times their share."""
        answered = ~np.isnan(values[rows])
        found = spearman(truth[rows][answered], values[rows][answered])
        return found * float(answered.mean()) if found > 0 else found

    return figure


# Intervals


def draw_rows(count: int, seed: Sequence[int], draws: int = DRAWS) -> Iterable[Rows]:
    """Rows of a task drawn with replacement, as often as a bootstrap wants; each task has a seed of its own."""
    generator = np.random.default_rng(list(seed))
    return (generator.integers(0, count, count) for _ in range(draws))


def interval(value: float, drawn: NDArray[np.float64]) -> Figure:
    """A figure with the middle 95 % of its bootstrap draws."""
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Figure(value, float(low), float(high))


class Mean(NamedTuple):
    """A mean over tasks."""

    value: float
    deviation: float | None
    """Standard deviation over the tasks (divided by their number minus 1); none for one task."""
    low: float
    high: float


def mean_over_tasks(figures: Sequence[Figure], drawn: Sequence[NDArray[np.float64]]) -> Mean:
    """The mean of the tasks' figures; its interval takes the tasks as given and draws their rows."""
    values = [figure.value for figure in figures]
    middle = interval(float(np.mean(values)), np.mean(np.stack(drawn), 0))
    return Mean(middle.value, float(np.std(values, ddof=1)) if len(values) > 1 else None, middle.low, middle.high)
