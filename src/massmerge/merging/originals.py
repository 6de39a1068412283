"""Base and experts as a merge reads them: a tensor at a time, every number looked at."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from massmerge.checkpoints.expert_tensors import ExpertTensor, Kept, difference, finite
from massmerge.io.tensor_file import TensorInfo, read_span
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.merging.plan import TensorPlan

KeptOf = Callable[[TensorPlan, str, Callable[[], Tensor]], Kept | None]
"""The factors of a task's delta, given tensor, task and what reads the base's own: none where the delta is zero."""
_UNREAD = torch.empty(0)


class Originals:
    """What a recipe's sources hold of each tensor."""

    def __init__(self, prepared: OpenedRecipe) -> None:
        self._prepared = prepared
        self.tasks = tuple(task.name for task in prepared.recipe.tasks)
        self.slots = prepared.base.skeleton.slots
        self.dtype, self.device = prepared.base.dtype, prepared.place.device
        share = prepared.recipe.merge.rank
        self._energy = share if isinstance(share, float) else None

    def base(self, name: str) -> Tensor:
        """The base's tensor; zeros where only experts have it."""
        base = self._prepared.base
        if name not in base.readings:
            return torch.zeros(self.slots[name].shape, dtype=self.dtype, device=self.device)
        return finite(base.read(name).to(self.device), self._base, name)

    def stored(self, tensor: TensorPlan) -> tuple[TensorInfo | None, dict[str, TensorInfo | None]]:
        """Where the files of the base and of the tasks that touch a tensor hold it as it is; none where they do not."""
        experts = self._prepared.experts
        held = {task: experts[task].stored(tensor.name) for task in self.touching(tensor)}
        return self._prepared.base.stored(tensor.name), held

    def base_span(self, name: str, info: TensorInfo, start: int, stop: int) -> Tensor:
        """Some numbers of the base's tensor, where it is stored as it is."""
        return finite(read_span(info, start, stop), self._base, name)

    def expert_span(self, task: str, name: str, info: TensorInfo, start: int, stop: int) -> Tensor:
        """The same numbers of the expert's."""
        return finite(read_span(info, start, stop), self._expert(task), name)

    def read(self, task: str, name: str) -> ExpertTensor:
        """The expert's tensor."""
        found = self._prepared.experts[task].read(name).to(self.device)
        for part in found.parts:
            finite(part, self._expert(task), name)
        return found

    @property
    def _base(self) -> str:
        return f"base ({self._prepared.recipe.base})"

    def _expert(self, task: str) -> str:
        return f"task {task} ({self._prepared.experts[task].source.text})"

    def touching(self, tensor: TensorPlan) -> tuple[str, ...]:
        """The tasks that may change a tensor."""
        return tuple(task for task, rank in zip(self.tasks, tensor.ranks, strict=True) if rank)

    def whole(self, tensor: TensorPlan, task: str, base: Tensor) -> Tensor:
        """The expert's own value of a tensor."""
        return self.read(task, tensor.name).value(base, self.slots[tensor.name])

    def delta(self, tensor: TensorPlan, task: str, base: Tensor) -> Tensor:
        """The expert's delta in float32; of a matrix (out, in)."""
        if tensor.matrix is None:
            return difference(base, self.whole(tensor, task, base))
        return self.read(task, tensor.name).matrix(base, tensor.kind)

    def kept(self, tensor: TensorPlan, task: str, base: Callable[[], Tensor]) -> Kept | None:
        """The expert's factors at the recipe's rank; none where the delta is zero. The base is read if it takes part."""
        rank, found = tensor.ranks[self.tasks.index(task)], self.read(task, tensor.name)
        return found.keep(base() if found.needs_base else _UNREAD, tensor.kind, rank, self._energy)
