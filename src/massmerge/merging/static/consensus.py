"""Consensus merging with TALL masks (Wang et al., 2024): entries that matter to too few tasks are left as the base's."""

from __future__ import annotations

from torch import Tensor

from massmerge.merging.static.deltas import Deltas


def tall_mask(delta: Tensor, total: Tensor, threshold: float) -> Tensor:
    """Entries that matter to a task: its delta is larger than `threshold` times what the other tasks add to it."""
    return delta.abs() > threshold * (total - delta).abs()


def consensus(deltas: Deltas, *, threshold: float, least: int) -> Tensor:
    """The sum of all deltas where at least `least` tasks find it important, else zero."""
    total = deltas.sum()
    votes = deltas.zeros().int()
    for _, delta in deltas:
        votes += tall_mask(delta, total, threshold)
    return total * (votes >= least)
