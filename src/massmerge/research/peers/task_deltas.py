"""The experts' deltas, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from massmerge.checkpoints import LowRank
from massmerge.checkpoints.skeleton import from_matrix
from massmerge.linalg.factors import Factors
from massmerge.merging.deltas import delta, finite, keep
from massmerge.merging.prepare import Prepared


class TaskDeltas:
    """What each task of a recipe changes. A tensor that the base does not have counts as zero there."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self.slots = prepared.base.skeleton.slots
        self.tasks = [task.name for task in prepared.recipe.tasks]
        self._names = {task: prepared.experts[task].names() for task in self.tasks}
        self.dtype = next(iter(prepared.base.readings.values())).info.dtype

    def names(self) -> list[str]:
        """The tensors of floating-point numbers that a task may change."""
        infos = self._prepared.base.readings
        touched = {name for names in self._names.values() for name in names}
        return sorted(n for n in touched if n not in infos or infos[n].info.dtype.is_floating_point)

    def delta(self, task: int, name: str) -> Tensor | None:
        """A task's delta of a tensor in float32, in the tensor's shape; none where it is zero."""
        given = self._given(task, name)
        if given is None:
            return None
        if isinstance(given, LowRank):
            return from_matrix(given.b.float() @ given.a.float(), self.slots[name])
        change = delta(self._base(name), given)
        return change if bool(change.any()) else None

    def total(self, name: str) -> Tensor:
        """The sum of all tasks' deltas of a tensor."""
        found = [change for task in range(len(self.tasks)) if (change := self.delta(task, name)) is not None]
        return torch.stack(found).sum(0) if found else torch.zeros(self.slots[name].shape)

    def factors(self, task: int, name: str, rank: int) -> Factors | None:
        """The first triplets of a task's delta of a matrix; none where it is zero."""
        slot, given = self.slots[name], self._given(task, name)
        if given is None or slot.matrix is None:
            return None
        kept = keep(self._base(name), given, slot.kind, min(rank, *slot.matrix))
        return None if kept is None else kept.factors

    def _given(self, task: int, name: str) -> Tensor | LowRank | None:
        if name not in self._names[self.tasks[task]]:
            return None
        expert = self._prepared.experts[self.tasks[task]]
        given = expert.read(name)
        for part in given if isinstance(given, LowRank) else (given,):
            finite(part, f"task {self.tasks[task]} ({expert.source.text})", name)
        return given

    def _base(self, name: str) -> Tensor:
        base = self._prepared.base
        if name not in base.readings:
            return torch.zeros(self.slots[name].shape, dtype=self.dtype)
        return finite(base.read(name), f"base ({self._prepared.recipe.base})", name)


def add_deltas(model: PreTrainedModel, deltas: TaskDeltas, names: Iterable[str], scale: float) -> None:
    """Task arithmetic: move some of a model's tensors by a multiple of the sum of all tasks' deltas, in place."""
    state = model.state_dict()
    for name in names:
        if name in state:
            state[name].add_(scale * deltas.total(name))
