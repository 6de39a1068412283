"""Base and experts as a merge reads them: a tensor at a time, every number looked at."""

from __future__ import annotations

import torch
from torch import Tensor

from massmerge.checkpoints import LowRank
from massmerge.checkpoints.skeleton import to_matrix
from massmerge.merging.deltas import Kept, delta, finite, in_full, keep
from massmerge.merging.from_bundle import BundledExpert
from massmerge.merging.plan import TensorPlan
from massmerge.merging.prepare import Prepared


class Originals:
    """What a recipe's sources hold of each tensor of the plan."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self.tasks = tuple(task.name for task in prepared.recipe.tasks)

    def touching(self, tensor: TensorPlan) -> tuple[str, ...]:
        """The tasks that may change a tensor."""
        return tuple(task for task, rank in zip(self.tasks, tensor.ranks, strict=True) if rank)

    def base(self, tensor: TensorPlan) -> Tensor:
        """The base's tensor; zeros where only experts have it."""
        if not tensor.in_base:
            return torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        return finite(self._prepared.base.read(tensor.name), f"base ({self._prepared.recipe.base})", tensor.name)

    def given(self, tensor: TensorPlan, task: str) -> Tensor | LowRank:
        """The expert's tensor, or its delta as two thin matrices."""
        expert = self._prepared.experts[task]
        found = expert.read(tensor.name)
        for part in found if isinstance(found, tuple) else (found,):
            finite(part, f"task {task} ({expert.source.text})", tensor.name)
        return found

    def whole(self, tensor: TensorPlan, task: str, base: Tensor) -> Tensor:
        """The expert's tensor, of one that has no factors."""
        return in_full(base, self.given(tensor, task), self._prepared.base.skeleton.slots[tensor.name])

    def delta(self, tensor: TensorPlan, task: str, base: Tensor) -> Tensor:
        """The expert's delta in float32; of a matrix (out, in)."""
        if tensor.matrix is None:
            return delta(base, self.whole(tensor, task, base))
        given = self.given(tensor, task)
        if isinstance(given, LowRank):
            return given.b.float() @ given.a.float()
        return to_matrix(delta(base, given), tensor.kind)

    def kept(self, tensor: TensorPlan, task: str, base: Tensor) -> Kept | None:
        """The expert's factors at the recipe's rank; none where the delta is zero."""
        expert, share = self._prepared.experts[task], self._prepared.recipe.merge.rank
        planned = tensor.ranks[self.tasks.index(task)]
        if isinstance(expert, BundledExpert):
            return expert.kept(tensor.name, planned)
        rank = share if isinstance(share, float) else planned
        return keep(base, self.given(tensor, task), tensor.kind, rank)
