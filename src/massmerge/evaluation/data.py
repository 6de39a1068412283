"""Rows of a suite: which of them are taken, their labels in the words of the heads, and the order of the stream."""

from __future__ import annotations

import hashlib
import math
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from sys import intern
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from massmerge.errors import InputError, MassError, listing
from massmerge.evaluation.metrics import plain_text
from massmerge.evaluation.sources import RowSource, open_source
from massmerge.evaluation.suite import VALIDATION, Suite, SuiteTask, label_set
from massmerge.io.spool import Spool

_SHOWN = 30  # labels of each side in an error; more would drown the message


@dataclass(frozen=True)
class RowNames:
    """What rows are called, by their places; made when it is asked for."""

    source: RowSource
    rows: Sequence[int]

    def __getitem__(self, place: int) -> str:
        return self.source.row_name(self.rows[place])


@dataclass
class TaskData:
    """The rows of one task that are measured."""

    task: str
    source: RowSource
    rows: list[int]
    """Their places in the source, ascending."""
    labels: list[str]
    """Their labels, in the head's words; a set of them as `join_labels` writes it."""
    total: int
    """How many rows the source has."""
    prompted: Callable[[Any], Any] = lambda item: item
    """What the model is asked, given what the source holds."""
    inputs: Spool = field(default_factory=Spool)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def where(self) -> str:
        """Path or id of the source."""
        return self.source.where

    @property
    def names(self) -> RowNames:
        """How these rows are called in reports."""
        return RowNames(self.source, self.rows)

    def read_inputs(self) -> None:
        """Copy the inputs to the spool."""
        for item in self.source.inputs(self.rows[len(self.inputs) :]):
            self.inputs.add(self.prompted(item))
        if len(self.inputs) != len(self.rows):
            raise MassError(f"{self.where}: changed while it was being read: rows are missing. Run again.")

    def sha256(self) -> str:
        """Checksum of inputs and labels, so that figures of the same rows can be told from others."""
        digest = hashlib.sha256()
        for place, label in enumerate(self.labels):
            content = hashlib.sha256(self.inputs.content(place)).digest()
            digest.update(content + hashlib.sha256(label.encode()).digest())
        return digest.hexdigest()


def read_task(
    name: str,
    task: SuiteTask,
    folder: Path,
    known: Sequence[str] | None,
    *,
    image: bool,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> TaskData:
    """Choose the rows of a task and read their labels; the inputs are read by `TaskData.read_inputs`.

    Args:
        name: the task.
        task: what the suite says of it.
        folder: what relative paths start from.
        known: the labels of its head; none for a task that writes its answers.
        image: whether inputs are images.
        split: the split, if one is asked for.
        limit: at most this many rows, drawn at random.
        seed: of that draw; a smaller limit takes some of the rows of a larger one.

    Raises:
        InputError: the source is not there, is empty, or has labels that the head does not know.
    """
    task = task.with_label_file(folder)
    whole, whole_split = task.whole(split)
    source = open_source(whole, folder, whole_split, image=image)
    several = task.metric == "micro_f1"
    labels = [task.head_labels(value) if several else task.head_label(value) for value in source.labels()]
    if not labels:
        raise InputError(f"{source.where}: has no rows. A task needs at least one.")
    if "" in labels and not several:
        row, count = labels.index(""), labels.count("")
        raise InputError(
            f"{source.row_name(row)}: has no label ({count} of {len(labels)} rows). Fill it in, or remove it."
        )
    if task.metric == "spearman":
        _refuse_other_than_numbers(source, labels, known)
    elif known is not None:
        _refuse_unknown_labels(source, task, labels, known)
    if known is None:
        labels = [plain_text(label) for label in labels]
    there = _part(name, task, split, len(labels)) if task.is_part(split) else np.arange(len(labels))
    if not len(there):
        raise InputError(f"{source.where}: the split {split!r} has no rows ({len(labels)} are too few to split).")
    draw = np.random.default_rng((seed, zlib.crc32(name.encode()))).permutation(len(there))
    rows = sorted(there[draw[:limit]].tolist())
    # Of a million rows, labels that are one object each take 60 MB.
    return TaskData(name, source, rows, [intern(labels[row]) for row in rows], len(there), task.prompted)


def _part(name: str, task: SuiteTask, split: str | None, count: int) -> np.ndarray[Any, Any]:
    """Which of so many training rows are the split `validation`, or the rest; always the same, whatever the seed."""
    order = np.random.default_rng(zlib.crc32(name.encode())).permutation(count)
    held = round((task.validation or 0.0) * count)
    return np.sort(order[:held] if split == VALIDATION else order[held:])


def _refuse_unknown_labels(source: RowSource, task: SuiteTask, labels: list[str], known: Sequence[str]) -> None:
    named = set().union(*map(label_set, labels)) if task.metric == "micro_f1" else set(labels)
    unknown = sorted(named - set(known))
    if unknown:
        raise InputError(
            f"{source.where}: the head does not know {len(unknown)} of the data's labels, such as {unknown[0]!r}.\n"
            f"  labels in the data: {_some(sorted(named))}\n  labels of the head: {_some(known)}\n"
            "  Map them in the suite: `labels: {label in the data: label of the head}`."
        )
    given = [task.positive] if task.positive is not None else []
    given += list(task.labels.values()) if isinstance(task.labels, dict) else task.labels or []
    strange = sorted(set(given) - set(known))
    if strange:
        raise InputError(
            f"{source.where}: the suite names labels that the head does not have: {_some(strange)}.\n"
            f"  labels of the head: {_some(known)}"
        )


def _some(labels: Iterable[str]) -> str:
    names = list(labels)
    rest = f", … and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _refuse_other_than_numbers(source: RowSource, labels: list[str], known: Sequence[str] | None) -> None:
    if known is not None and len(known) != 1:
        raise InputError(
            f"{source.where}: `metric: spearman` is for heads with one output; this one has {len(known)}: {_some(known)}."
        )
    for row, label in enumerate(labels):
        try:
            good = math.isfinite(float(label))
        except ValueError:
            good = False
        if not good:
            raise InputError(f"{source.row_name(row)}: {label!r} is not a number, which `metric: spearman` needs.")


def read_suite(
    suite: Suite,
    folder: Path,
    known: Mapping[str, Sequence[str] | None],
    *,
    image: bool,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> dict[str, TaskData]:
    """Choose the rows of every task and read their labels; what is wrong with any of them is told at once.

    Args:
        suite: the suite.
        folder: what its relative paths start from.
        known: for each task of the bundle the labels of its head, or none if it writes its answers.
        image: whether inputs are images.
        split: the split, if one is asked for; `test` otherwise.
        limit: at most this many rows per task.
        seed: of the draw of rows.
    """
    absent = [task for task in suite.tasks if task not in known]
    if absent:
        raise InputError(
            f"the bundle has no task {', '.join(map(repr, absent))} with labels; choose from {', '.join(known) or 'none'}. "
            "Rename it in the suite, merge a bundle with it, or choose tasks by --task."
        )
    found: dict[str, TaskData] = {}
    faults: list[str] = []
    for name, task in suite.tasks.items():
        try:
            found[name] = read_task(name, task, folder, known[name], image=image, split=split, limit=limit, seed=seed)
        except InputError as error:
            faults.append(f"task {name}: {error}")
    if faults:
        raise InputError("\n".join(faults) if len(faults) == 1 else f"{len(faults)} tasks:{listing(faults, 100)}")
    return found


class RowOrder(Sequence[tuple[str, int]]):
    """Rows of several tasks in an order, each as (task, place). A row takes 8 bytes, where a pair takes 100.

    Args:
        counts: how many rows each task has.
        numbers: the rows (n,), numbered from the first of the first task to the last of the last.
    """

    def __init__(self, counts: Mapping[str, int], numbers: NDArray[np.int64]) -> None:
        self.counts, self._numbers, self._tasks = counts, numbers, list(counts)
        self._starts = list(accumulate(counts.values(), initial=0))

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> tuple[str, int]: ...
    @overload
    def __getitem__(self, place: slice) -> RowOrder: ...
    def __getitem__(self, place: int | slice) -> tuple[str, int] | RowOrder:
        """A row, or some of them in their order."""
        if isinstance(place, slice):
            return RowOrder(self.counts, self._numbers[place])
        number = int(self._numbers[place])
        task = bisect_right(self._starts, number) - 1
        return self._tasks[task], number - self._starts[task]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowOrder) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def sorted_within(self, window: int, key: Callable[[tuple[str, int]], int]) -> RowOrder:
        """The same rows, those of each window sorted by a key."""
        found = [
            self._numbers[at + np.argsort([key(row) for row in self[at : at + window]], kind="stable")]
            for at in range(0, len(self), window)
        ]
        return RowOrder(self.counts, np.concatenate(found))


def stream_order(counts: Mapping[str, int], seed: int) -> RowOrder:
    """Every row of every task once, in an order that only the seed decides."""
    return RowOrder(counts, np.random.default_rng(seed).permutation(sum(counts.values())))


def batches_of_one_task(counts: Mapping[str, int], size: int, seed: int) -> list[list[tuple[str, int]]]:
    """Every row once, in batches whose rows are of one task; rows and batches are both shuffled."""
    draws = np.random.default_rng(seed)
    batches = []
    for task, count in counts.items():
        places = draws.permutation(count).tolist()
        batches += [[(task, place) for place in places[i : i + size]] for i in range(0, count, size)]
    return [batches[i] for i in draws.permutation(len(batches))]
