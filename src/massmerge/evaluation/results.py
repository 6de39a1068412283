"""What an evaluation found, as plain data."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from massmerge.evaluation.data import RowNames
from massmerge.evaluation.metrics import Figure, Given, Mean
from massmerge.evaluation.reliability import Reliability
from massmerge.evaluation.suite import Metric

UNKNOWN, FAILED = "unknown", "failed"
_NONE = Given()


@dataclass(slots=True)
class RowResult:
    """One row of the stream and what came of it."""

    task: str
    place: int
    """Its place among the rows of its task."""
    label: str
    given: Given
    selected: tuple[str, ...] = ()
    residuals: array[float] = field(default_factory=lambda: array("f"))
    """Of each task of the bundle, in their order; empty where nothing was routed."""
    error: str | None = None
    known: Given = _NONE
    """The answer with the task given."""
    expert: Given = _NONE
    """The answer of the task's own expert."""
    confidence: float | None = None
    """How sure the answer was."""
    once: Given = _NONE
    """The answer of one pass: the router's choice of head, on the base's own features."""
    once_known: Given = _NONE
    """The answer of the task's head on the base's own features."""

    @property
    def routed(self) -> str:
        """The task that the router likes best, or why there is none."""
        if self.error is not None:
            return FAILED
        return self.selected[0] if self.selected else UNKNOWN


@dataclass(frozen=True)
class TaskResult:
    """The figures of one task."""

    task: str
    metric: Metric
    where: str
    sha256: str
    rows: int
    total: int
    """Rows that its source has; fewer may have been drawn."""
    failed: int
    abstained: int
    strict: Figure
    """Right is the pair (task, label)."""
    shared: Figure
    """Right is also a label of another task that is declared to mean the same."""
    routing: Figure
    """Share of rows of which the router likes their own task best."""
    in_set: Figure
    """Share of rows whose selected set has their own task in it."""
    known: Figure | None
    """The same bundle with the task given."""
    reference: float | None
    """The expert's own figure."""
    reference_source: Literal["suite", "measured"] | None
    normalised: Figure | None
    """The strict figure divided by the expert's own."""
    normalised_shared: Figure | None
    normalised_known: Figure | None
    once: Figure | None = None
    """The frozen base with the same heads and the same router: one pass."""
    once_known: Figure | None = None
    """The frozen base with the head of the task."""
    normalised_once: Figure | None = None
    normalised_once_known: Figure | None = None


@dataclass(frozen=True)
class Confusion:
    """How many rows of each task were routed where."""

    tasks: tuple[str, ...]
    columns: tuple[str, ...]
    """The bundle's tasks, then `unknown` (the model abstained) and `failed` (the row could not be read)."""
    counts: tuple[tuple[int, ...], ...]

    def worst(self, most: int = 10) -> list[tuple[str, str, int, float]]:
        """The most frequent mistakes: task, where its rows went, how many, which share of the task's rows."""
        found = [
            (task, column, count, count / sum(row))
            for task, row in zip(self.tasks, self.counts, strict=True)
            for column, count in zip(self.columns, row, strict=True)
            if count and column != task
        ]
        return sorted(found, key=lambda one: (-one[3], one[0], one[1]))[:most]


@dataclass(frozen=True)
class BundleSizes:
    """Bytes of a bundle."""

    bundle: int
    """Everything but heads."""
    heads: int
    base: int

    @property
    def ratio(self) -> float:
        """Times the base, heads not counted."""
        return self.bundle / self.base


@dataclass(frozen=True)
class Evaluation:
    """What `mass eval` found."""

    suite: str
    bundle: str
    options: dict[str, Any]
    tasks: tuple[TaskResult, ...]
    means: dict[str, Mean]
    """Over the tasks, of each figure that every task has: strict, shared, routing, in_set, known, reference, normalised,
    normalised_shared, normalised_known, once, once_known, normalised_once, normalised_once_known."""
    confusion: Confusion
    set_sizes: dict[int, int]
    """How many rows had a selected set of each size; 0 where the model abstained."""
    timings: dict[str, float]
    """Milliseconds an input: first pass, routing, second pass, heads; and `all` with reading and preparing inputs."""
    sizes: BundleSizes | None
    notes: tuple[str, ...]
    created: str
    results: Sequence[RowResult] = field(repr=False)
    """Every row, in the order of the stream."""
    names: dict[str, RowNames] = field(repr=False)
    """How the rows of each task are called."""
    reliability: Reliability | None = None
    """What the confidences are worth; none where answers have none, or are numbers."""

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Name and error of every row that could not be answered; they count as wrong."""
        return [(self.names[r.task][r.place], r.error) for r in self.results if r.error is not None]

    @property
    def routes(self) -> bool:
        """Whether answers name tasks; a static merge's texts do not."""
        return "method" not in self.options or any(row.selected for row in self.results)

    @property
    def shares_labels(self) -> bool:
        """Whether the shared figures differ in kind from the strict ones."""
        return bool(self.options.get("shared_labels"))

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, without the rows."""
        tasks = [{name: _plain(value) for name, value in vars(task).items()} for task in self.tasks]
        return {
            "suite": self.suite,
            "bundle": self.bundle,
            "created": self.created,
            "options": self.options,
            "tasks": tasks,
            "means": {name: mean._asdict() for name, mean in self.means.items()},
            "confusion": asdict(self.confusion),
            "reliability": None if self.reliability is None else self.reliability.to_dict(),
            "set_sizes": {str(size): count for size, count in self.set_sizes.items()},
            "timings": self.timings,
            "sizes": None if self.sizes is None else {**asdict(self.sizes), "ratio": self.sizes.ratio},
            "notes": list(self.notes),
            "failures": [{"row": name, "error": error} for name, error in self.failures],
        }

    def to_json(self) -> str:
        """The figures as JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)


def _plain(value: Any) -> Any:
    return value._asdict() if isinstance(value, Figure) else value


def count_sets(rows: Iterable[RowResult]) -> dict[int, int]:
    """How many of the rows that could be read had a selected set of each size."""
    return dict(sorted(Counter(len(row.selected) for row in rows if row.error is None).items()))


def count_routes(rows: Iterable[RowResult], tasks: list[str], columns: list[str]) -> Confusion:
    """Where the rows of each task were routed."""
    found = Counter((row.task, row.routed) for row in rows)
    names = (*columns, UNKNOWN, FAILED)
    return Confusion(tuple(tasks), names, tuple(tuple(found[task, name] for name in names) for task in tasks))
