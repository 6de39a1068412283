"""Figures of many rows at once: per task, their mean, and how far chance may have moved it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from massmerge.evaluation.metrics import Given
from massmerge.evaluation.results import RowResult
from massmerge.research.studies.context import StudyContext

_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Measured:
    """One figure of every task."""

    tasks: dict[str, float]
    mean: float
    deviation: float | None
    """Standard deviation over the tasks."""
    margin: float
    """Half of the mean's 95 % interval: tasks are given, their rows are drawn."""
    normalised: float | None = None
    """Mean over the tasks of the figures divided by the experts' own; none where those are not known."""

    def plain(self) -> dict[str, Any]:
        """As plain data, for cells and rows."""
        return {
            "mean": self.mean, "deviation": self.deviation, "margin": self.margin, "normalised": self.normalised,
            "tasks": dict(self.tasks),
        }  # fmt: skip

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Measured:
        """From plain data."""
        return cls(dict(plain["tasks"]), plain["mean"], plain["deviation"], plain["margin"], plain.get("normalised"))


def summarize(
    tasks: Mapping[str, float], counts: Mapping[str, int], references: Mapping[str, float] | None = None
) -> Measured:
    """The mean of the tasks' shares with its spread and margin.

    Args:
        tasks: for each task a share from 0 to 1.
        counts: for each task how many rows it is of.
        references: for each task the expert's own figure; normalised figures need all of them.
    """
    values = np.array(list(tasks.values()))
    variance = sum(p * (1 - p) / counts[task] for task, p in tasks.items() if 0 <= p <= 1)
    whole = references is not None and all(references.get(task) for task in tasks)
    return Measured(
        dict(tasks),
        float(values.mean()),
        float(values.std(ddof=1)) if len(values) > 1 else None,
        _Z95 * math.sqrt(variance) / len(values),
        float(np.mean([p / references[task] for task, p in tasks.items()])) if whole and references else None,
    )


def measure_answers(context: StudyContext, answers: Sequence[Given], *, normalise: bool = True) -> Measured:
    """The tasks' own metric over answers to every sample, in their order; a pair (task, label) is right or not."""
    shares: dict[str, float] = {}
    at = 0
    for task, count in context.ready.counts.items():
        shares[task] = context.figure(task, answers[at : at + count])
        at += count
    return summarize(shares, context.ready.counts, context.references if normalise else None)


def measure_routing(context: StudyContext, chosen: Tensor) -> Measured:
    """Share of samples whose best task is their own.

    Args:
        context: the study's.
        chosen: for each sample the position of a task in the bundle (n,); -1 for none.
    """
    right = chosen == context.owners
    shares = {
        task: float(right[context.owners == context.tasks.index(task)].double().mean()) for task in context.measured
    }
    return summarize(shares, context.ready.counts)


def routed_rows(context: StudyContext, chosen: Tensor) -> list[RowResult]:
    """The samples as rows of an evaluation that were routed to these tasks (n,), for a routing matrix."""
    return [
        RowResult(sample.task, sample.place, sample.label, Given(), (context.tasks[task],) if task >= 0 else ())
        for sample, task in zip(context.samples, chosen.tolist(), strict=True)
    ]
