"""The experts' deltas, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from massmerge.linalg.factors import Factors
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.merging.originals import Originals


class TaskDeltas:
    """What each task of a recipe changes. A tensor that the base does not have counts as zero there."""

    def __init__(self, prepared: OpenedRecipe) -> None:
        self._originals = Originals(prepared)
        self.slots, self.dtype, self.tasks = self._originals.slots, self._originals.dtype, self._originals.tasks
        self._infos = prepared.base.readings
        self._names = {task: prepared.experts[task].names() for task in self.tasks}

    def names(self) -> list[str]:
        """The tensors of floating-point numbers that a task may change."""
        touched = {name for names in self._names.values() for name in names}
        return sorted(n for n in touched if n not in self._infos or self._infos[n].info.dtype.is_floating_point)

    def delta(self, task: int, name: str) -> Tensor | None:
        """A task's delta of a tensor in float32, in the tensor's shape; none where it is zero."""
        if name not in self._names[self.tasks[task]]:
            return None
        given = self._originals.read(self.tasks[task], name)
        change = given.delta(self._originals.base(name), self.slots[name])
        return change if bool(change.any()) else None

    def total(self, name: str) -> Tensor:
        """The sum of all tasks' deltas of a tensor."""
        found = [change for task in range(len(self.tasks)) if (change := self.delta(task, name)) is not None]
        none = torch.zeros(self.slots[name].shape, device=self._originals.device)
        return torch.stack(found).sum(0) if found else none

    def factors(self, task: int, name: str, rank: int) -> Factors | None:
        """The first triplets of a task's delta of a matrix; none where it is zero."""
        slot = self.slots[name]
        if name not in self._names[self.tasks[task]] or slot.matrix is None:
            return None
        given = self._originals.read(self.tasks[task], name)
        kept = given.keep(self._originals.base(name), slot.kind, min(rank, *slot.matrix))
        return None if kept is None else kept.factors


def add_deltas(model: PreTrainedModel, deltas: TaskDeltas, names: Iterable[str], scale: float) -> None:
    """Task arithmetic: move some of a model's tensors by a multiple of the sum of all tasks' deltas, in place."""
    state = model.state_dict()
    for name in names:
        if name in state:
            state[name].add_(scale * deltas.total(name))
