"""DARE (Yu et al., 2024): entries are dropped at random, the others scaled up, and what is left is added."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from massmerge.merging.static.deltas import Deltas


def dare(deltas: Deltas, *, drop: float, seed: int) -> Tensor:
    """The sum of the deltas, each with its entries dropped with probability `drop` and divided by `1 - drop`."""
    total = deltas.zeros()
    for task, delta in deltas:
        kept = kept_entries(delta.shape, drop, seed, task, deltas.tensor).to(delta.device)
        total += delta * kept / (1 - drop)
    return total


def kept_entries(shape: tuple[int, ...], drop: float, seed: int, task: str, tensor: str) -> Tensor:
    """Which entries of a task's delta survive; the same for these arguments, whatever else is merged and in what order."""
    digest = hashlib.sha256(f"{seed}/{task}/{tensor}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.rand(shape, generator=generator) >= drop
