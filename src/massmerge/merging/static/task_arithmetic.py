"""Task arithmetic (Ilharco et al., 2023): base + scale · sum of the deltas."""

from __future__ import annotations

from torch import Tensor

from massmerge.merging.static.deltas import Deltas


def task_arithmetic(deltas: Deltas) -> Tensor:
    """The sum of all deltas, before it is scaled."""
    return deltas.sum()
