"""A tensor of all tasks a span of its numbers at a time, for methods in which each number goes its own way.

What is read and computed then stays in a processor's cache and in buffers that are used again, whatever the tensor's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from massmerge.checkpoints.expert_tensors import difference
from massmerge.io.tensor_file import TensorInfo
from massmerge.merging.originals import Originals
from massmerge.merging.plan import TensorPlan
from massmerge.merging.static.deltas import Deltas

_LONGEST = 3 << 16  # numbers; their float32 stays below what the allocator maps by itself
_TOGETHER = 1 << 20  # numbers of all tasks
_SQUARED = 1 << 16  # at a time in float64


@dataclass(frozen=True)
class Span:
    """Some numbers of a tensor: where they are in the flattened tensor, the base's, and the deltas of all tasks."""

    start: int
    stop: int
    base: Tensor
    deltas: Deltas


class Spans:
    """The spans of a tensor that base and experts store as it is.

    Args:
        tensor: the tensor.
        originals: base and experts.
        base: where the base stores it.
        experts: where the tasks that touch it do.
    """

    def __init__(
        self, tensor: TensorPlan, originals: Originals, base: TensorInfo, experts: Mapping[str, TensorInfo]
    ) -> None:
        self.tensor, self.dtype = tensor, base.dtype
        self._originals, self._base, self._experts = originals, base, experts
        self.squares = torch.zeros(len(originals.tasks), dtype=torch.float64)
        """The square of each task's delta, as far as spans were read."""

    @classmethod
    def of(cls, tensor: TensorPlan, originals: Originals) -> Spans | None:
        """None where a file holds the tensor otherwise than it is merged, or a graphics processor merges it as a whole."""
        if originals.device.type != "cpu":
            return None
        base, experts = originals.stored(tensor)
        known = {task: info for task, info in experts.items() if info is not None}
        return cls(tensor, originals, base, known) if base is not None and len(known) == len(experts) else None

    def __iter__(self) -> Iterator[Span]:
        count = self._base.nbytes // self._base.dtype.itemsize
        step = min(_LONGEST, max(1, _TOGETHER // max(1, len(self._experts))))
        for start in range(0, count, step):
            yield self._span(start, min(count, start + step))

    def _span(self, start: int, stop: int) -> Span:
        base = self._originals.base_span(self.tensor.name, self._base, start, stop)

        @cache
        def read(task: str) -> Tensor:
            """A task's delta in this span, its length noted."""
            delta = difference(
                base, self._originals.expert_span(task, self.tensor.name, self._experts[task], start, stop)
            )
            self.squares[self._originals.tasks.index(task)] += _square(delta)
            return delta

        tasks = self._originals.tasks
        deltas = Deltas(
            self.tensor.name, (stop - start,), len(tasks), tuple(self._experts), read, lambda task: None,
            self._originals.device,
        )  # fmt: skip
        return Span(start, stop, base, deltas)


def _square(delta: Tensor) -> float:
    total = 0.0
    for part in torch.split(delta, _SQUARED):
        wide = part.double()
        total += float(torch.dot(wide, wide))
    return total
