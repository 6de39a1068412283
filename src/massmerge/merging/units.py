"""A merge as units: tensors of all tasks, large ones by task and then together, and the large files of the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from massmerge.bundle.parts import tensor_key
from massmerge.engines.unit import Unit
from massmerge.merging.plan import Plan, TensorPlan
from massmerge.merging.unit_costs import (
    FACTORED,
    look_seconds,
    task_seconds,
    tensor_memory,
    tensor_seconds,
    write_seconds,
)

SPLIT = 30.0
"""Seconds from which on a tensor's tasks are units of their own."""
_SMALL = 20
"""Times what an engine spends on a unit: tensors that take less share one."""
_LOOKED = 0.1  # seconds; each look leaves a file, which should not be larger than what was looked at


@dataclass(frozen=True)
class MakeParts:
    """Whole tensors, one after the other, with what a static method has found by looking at all of them."""

    indices: tuple[int, ...]
    found: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MakeShare:
    """The factors of one task's delta."""

    index: int
    task: str


@dataclass(frozen=True)
class Combine:
    """A tensor, from its tasks' factors; the files of those that were made before the units began."""

    index: int
    shares: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LookAt:
    """Figures of tensors that a static method must know before it merges the first."""

    key: str
    step: int
    indices: tuple[int, ...]
    found: dict[str, Any]


@dataclass(frozen=True)
class LargeFile:
    """A large file of the result."""

    path: Path
    """In the result."""
    task: int | None
    """The position of its task, if it is one's."""
    nbytes: int
    """About its bytes."""
    tensors: tuple[str, ...] = ()
    """What it holds, where it is one of weights that may be in several files."""


@dataclass(frozen=True)
class WriteFile:
    """A file of the result, made of the base and of parts."""

    file: LargeFile
    names: dict[str, str]


def share_key(index: int, position: int) -> str:
    """The key of the part that holds one task's factors of a tensor."""
    return f"{tensor_key(index)}.{position}"


def part_units(plan: Plan, finished: dict[str, str], found: dict[str, Any], overhead: float) -> list[Unit]:
    """The units of all tensors that are not finished.

    Args:
        plan: the plan.
        finished: files of the parts that are there, by their keys.
        found: what a static method has found by looking at all tensors.
        overhead: seconds that the engine spends on a unit.
    """
    todo = [(i, t) for i, t in enumerate(plan.tensors) if tensor_key(i) not in finished]
    large = {i for i, t in todo if _is_split(plan, t)}
    units = [unit for i, t in todo if i in large for unit in _split(plan, i, t, finished)]
    small = [(i, t) for i, t in todo if i not in large]
    for group in _grouped(small, [tensor_seconds(t, plan) for _, t in small], _SMALL * overhead):
        indices = tuple(i for i, _ in group)
        spent = sum(tensor_seconds(t, plan) for _, t in group)
        units.append(
            Unit(_named(group), max(tensor_memory(t) for _, t in group), spent, data=MakeParts(indices, found))
        )
    return units


def _is_split(plan: Plan, tensor: TensorPlan) -> bool:
    shared = sum(rank > 0 for rank in tensor.ranks) > 1 and tensor.matrix is not None
    return shared and plan.method in FACTORED and tensor_seconds(tensor, plan) > SPLIT


def _split(plan: Plan, index: int, tensor: TensorPlan, finished: dict[str, str]) -> list[Unit]:
    keys = {share_key(index, i): plan.tasks[i].name for i, rank in enumerate(tensor.ranks) if rank}
    units = []
    for key, task in keys.items():
        if key not in finished:
            spent = task_seconds(tensor, plan, task)
            name = f"{tensor.name} of {task}"
            units.append(Unit(name, tensor_memory(tensor, task_only=True), spent, data=MakeShare(index, task)))
    known = {task: finished[key] for key, task in keys.items() if key in finished}
    after = tuple(unit.key for unit in units)
    together = tensor_seconds(tensor, plan) - sum(task_seconds(tensor, plan, task) for task in keys.values())
    return [*units, Unit(tensor.name, tensor_memory(tensor), together, after, Combine(index, known))]


def look_units(plan: Plan, indices: Sequence[int], step: int, found: dict[str, Any]) -> list[Unit]:
    """The units of one look at all tensors; they are the same whatever is finished, for so are the keys of their parts."""
    tensors = [(i, plan.tensors[i]) for i in indices]
    groups = _grouped(tensors, [look_seconds(t) for _, t in tensors], _LOOKED)
    return [
        Unit(
            f"look {step + 1} at {_named(group)}",
            max(tensor_memory(t, task_only=True) for _, t in group),
            sum(look_seconds(t) for _, t in group),
            data=LookAt(f"look{step}.{number:05d}", step, tuple(i for i, _ in group), found),
        )
        for number, group in enumerate(groups)
    ]


def file_units(files: Iterable[LargeFile], names: dict[str, str]) -> list[Unit]:
    """The units of large files; `names` are those of the parts that they are made of."""
    return [
        Unit(f"writing {file.path.as_posix()}", 1 << 28, write_seconds(file.nbytes), data=WriteFile(file, names))
        for file in files
    ]


def _grouped(
    tensors: Sequence[tuple[int, TensorPlan]], seconds: Sequence[float], least: float
) -> list[list[tuple[int, TensorPlan]]]:
    """Tensors side by side until they take long enough."""
    groups: list[list[tuple[int, TensorPlan]]] = []
    spent = least
    for one, takes in zip(tensors, seconds, strict=True):
        if spent >= least:
            groups.append([])
            spent = 0.0
        groups[-1].append(one)
        spent += takes
    return groups


def _named(group: Sequence[tuple[int, TensorPlan]]) -> str:
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    return f"{group[0][1].name}{more}"
