"""Weight averaging: the mean of the experts."""

from __future__ import annotations

from torch import Tensor

from massmerge.merging.static.deltas import Deltas


def average(deltas: Deltas) -> Tensor:
    """The mean of all tasks' deltas; a task that leaves the tensor as it is counts as zero."""
    return deltas.sum() / deltas.count
