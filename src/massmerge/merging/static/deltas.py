"""The deltas of all tasks of one tensor, as the methods see them: read one after the other, never all in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from massmerge.io.placement import CPU
from massmerge.linalg.factors import Factors, truncated_svd


@dataclass(frozen=True)
class Deltas:
    """One tensor's delta of each task that changes it. Each loop reads them again, so memory holds one at a time."""

    tensor: str
    """The tensor's name."""
    shape: tuple[int, ...]
    """Of each delta; of a matrix (out, in)."""
    count: int
    """How many tasks there are, those included that leave the tensor as it is."""
    tasks: tuple[str, ...]
    """Names of those that change it, in the recipe's order."""
    read: Callable[[str], Tensor]
    """A task's delta, in float32."""
    factor: Callable[[str], Factors | None]
    """A task's factors at the recipe's rank; none where the delta is zero. Matrices only."""
    device: torch.device = CPU
    """Where all of them are."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for task in self.tasks:
            yield task, self.read(task)

    def zeros(self) -> Tensor:
        """A delta of zeros."""
        return torch.zeros(self.shape, device=self.device)

    def sum(self) -> Tensor:
        """The sum of all deltas."""
        total = self.zeros()
        for _, delta in self:
            total += delta
        return total

    def factors(self) -> dict[str, Factors]:
        """The factors of every task whose delta is not zero."""
        found = {task: self.factor(task) for task in self.tasks}
        return {task: factors for task, factors in found.items() if factors is not None}

    @classmethod
    def of(cls, tensor: str, given: Mapping[str, Tensor], rank: int | None = None, count: int | None = None) -> Deltas:
        """Deltas that are in memory already.

        Args:
            tensor: its name.
            given: the delta of each task.
            rank: of their factors; the full one by default.
            count: the number of all tasks; that of the given ones by default.
        """
        shape = tuple(next(iter(given.values())).shape)

        def factor(task: str) -> Factors | None:
            """The factors of a task's delta; none where it changes nothing."""
            return truncated_svd(given[task], rank or min(shape)) if bool(given[task].any()) else None

        device = next(iter(given.values())).device
        return cls(tensor, shape, count or len(given), tuple(given), given.__getitem__, factor, device)
