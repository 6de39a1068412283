"""From the rows of a stream to the figures of its tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from massmerge.evaluation.data import TaskData
from massmerge.evaluation.metrics import (
    DRAWS,
    Figure,
    Given,
    Mean,
    Statistic,
    draw_rows,
    interval,
    mean_over_tasks,
    statistic,
)
from massmerge.evaluation.results import RowResult, TaskResult
from massmerge.evaluation.suite import SuiteTask
from massmerge.linalg.intervals import wilson

Drawn = dict[str, NDArray[np.float64]]
"""For each figure its bootstrap draws (draws,)."""


@dataclass(frozen=True)
class Scored:
    """A task's figures with the draws that their means need."""

    result: TaskResult
    drawn: Drawn


def score_task(
    data: TaskData,
    task: SuiteTask,
    rows: Sequence[RowResult],
    *,
    groups: Mapping[str, int],
    reference: float | None = None,
    known: bool = False,
    expert: bool = False,
    once: bool = False,
    seed: Sequence[int] = (0,),
    draws: int = DRAWS,
) -> Scored:
    """Every figure of one task.

    Args:
        data: the task's rows.
        task: what the suite says of it: metric and positive label.
        rows: what came of each of its rows.
        groups: labels of other tasks that mean the same (`shared_groups`).
        reference: the expert's own figure as the suite gives it.
        known: whether the rows hold answers with the task given.
        expert: whether the rows hold the expert's own answers; they go before `reference`.
        once: whether the rows hold answers of one pass.
        seed: of the bootstrap.
        draws: of the bootstrap.
    """
    statistics = _statistics(data, task, rows, groups, known=known, expert=expert, once=once)
    drawn = _draw(statistics, len(rows), seed, draws)
    everything = np.arange(len(rows))
    values = {name: of(everything) for name, of in statistics.items()}
    shares = {"routing", "in_set"} | (
        {"strict", "shared", "known", "once", "once_known"} if task.metric == "accuracy" else set()
    )
    figures = {
        name: wilson(round(value * len(rows)), len(rows)) if name in shares else interval(value, drawn[name])
        for name, value in values.items()
    }
    own = values.get("reference", reference)
    if own is not None:
        drawn.setdefault("reference", np.full(draws, own))
    normalised = _normalise(values, drawn) if own else {}
    result = TaskResult(
        data.task, task.metric, data.where, data.sha256(), len(rows), data.total,
        sum(r.error is not None for r in rows), sum(r.error is None and not r.selected for r in rows),
        figures["strict"], figures["shared"], figures["routing"], figures["in_set"], figures.get("known"),
        own, None if own is None else "measured" if expert else "suite",
        normalised.get("normalised"), normalised.get("normalised_shared"), normalised.get("normalised_known"),
        figures.get("once"), figures.get("once_known"),
        normalised.get("normalised_once"), normalised.get("normalised_once_known"),
    )  # fmt: skip
    return Scored(result, drawn)


def _statistics(
    data: TaskData,
    task: SuiteTask,
    rows: Sequence[RowResult],
    groups: Mapping[str, int],
    *,
    known: bool,
    expert: bool,
    once: bool,
) -> dict[str, Statistic]:
    """Each figure as a function of the rows that are counted, so that it can be drawn again."""
    labels = [row.label for row in rows]

    def figure_of(given: Iterable[Given], sharing: Mapping[str, int]) -> Statistic:
        """The task's figure from some answers."""
        return statistic(task.metric, data.task, labels, given, sharing, task.positive)

    strict = figure_of((r.given for r in rows), {})
    found = {"strict": strict, "shared": figure_of((r.given for r in rows), groups) if groups else strict}
    if known:
        found["known"] = figure_of((r.known for r in rows), {})
    if once:
        found["once"] = figure_of((r.once for r in rows), {})
        found["once_known"] = figure_of((r.once_known for r in rows), {})
    if expert:
        found["reference"] = figure_of((r.expert for r in rows), {})
    routed = np.array([r.routed == data.task for r in rows])
    held = np.array([data.task in r.selected for r in rows])
    found["routing"] = lambda chosen: float(routed[chosen].mean())
    found["in_set"] = lambda chosen: float(held[chosen].mean())
    return found


def _draw(statistics: Mapping[str, Statistic], count: int, seed: Sequence[int], draws: int) -> Drawn:
    """Each figure on the same draws of rows, so that ratios of two of them are drawn as pairs."""
    found: dict[str, list[float]] = {name: [] for name in statistics}
    for rows in draw_rows(count, seed, draws):
        for name, of in statistics.items():
            found[name].append(of(rows))
    return {name: np.array(values) for name, values in found.items()}


def _normalise(values: Mapping[str, float], drawn: Drawn) -> dict[str, Figure]:
    """Figures divided by the expert's own; their draws are put among the others."""
    names = {"strict": "normalised"} | {n: f"normalised_{n}" for n in ("shared", "known", "once", "once_known")}
    own = drawn["reference"]
    reference = values.get("reference", float(own[0]))
    found = {}
    for name, normalised in names.items():
        if name in values:
            # In a draw where the expert gets nothing right the ratio means nothing.
            drawn[normalised] = np.divide(drawn[name], own, out=np.ones_like(own), where=own > 0)
            found[normalised] = interval(values[name] / reference, drawn[normalised])
    return found


def mean_figures(scored: Sequence[Scored]) -> dict[str, Mean]:
    """The mean over the tasks of each figure that every task has."""
    means = {}
    for name in (
        "strict", "shared", "routing", "in_set", "known", "reference", "normalised", "normalised_shared", "normalised_known",
        "once", "once_known", "normalised_once", "normalised_once_known",
    ):  # fmt: skip
        figures = [getattr(one.result, name) for one in scored]
        if all(figure is not None for figure in figures):
            plain = [f if isinstance(f, Figure) else Figure(f, f, f) for f in figures]
            means[name] = mean_over_tasks(plain, [one.drawn[name] for one in scored])
    return means
