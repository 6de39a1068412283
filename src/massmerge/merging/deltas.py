"""From an expert's tensor to its delta, and from all tasks' deltas of one matrix to what the bundle keeps of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from massmerge.checkpoints import LowRank
from massmerge.checkpoints.skeleton import Kind, Slot, from_matrix, to_matrix
from massmerge.errors import InputError
from massmerge.linalg.factors import (
    Factors,
    accept_distinct,
    cosine_matrix,
    energy_rank,
    lora_svd,
    principal_cosine,
    remaining_energy,
    truncated_svd,
)
from massmerge.recipe import Redundancy

_NOISE = 1e-6
_LARGEST = torch.finfo(torch.float32).max ** 0.5  # norms and residuals square what they see


class Kept(NamedTuple):
    """What is kept of one task's delta of one matrix, and how much that is."""

    factors: Factors
    norm: float
    """Length of the whole delta."""
    energy: float
    """Share of its square that the factors hold."""


def delta(base: Tensor, expert: Tensor) -> Tensor:
    """Expert minus base, in float32.

    An expert saved in less precision than the base is compared with the base in that precision: otherwise every tensor that
    fine-tuning left alone would come out as a delta made of rounding errors.
    """
    if base.is_floating_point() and expert.dtype.itemsize < base.dtype.itemsize:
        base = base.to(expert.dtype)
    return expert.float() - base.float()


def finite(tensor: Tensor, where: str, name: str) -> Tensor:
    """The tensor, if a model can compute with every number in it.

    Raises:
        InputError: it holds NaN or infinity, or numbers whose squares are infinite in float32.
    """
    if tensor.is_floating_point() and tensor.numel():
        most = float(torch.stack(tensor.aminmax()).float().abs().max())
        if not most < _LARGEST:  # NaN too, which is less than nothing
            what = f"numbers up to {most:.1e}, too large for float32" if math.isfinite(most) else "NaN or infinity"
            raise InputError(f"{where}: {name} holds {what}. Fine-tune or save it again.")
    return tensor


def in_full(base: Tensor, given: Tensor | LowRank, slot: Slot) -> Tensor:
    """An expert's tensor, also where only its delta is given, as two thin matrices."""
    if isinstance(given, LowRank):
        return base.float() + from_matrix(given.b.float() @ given.a.float(), slot)
    return given


def keep(base: Tensor, given: Tensor | LowRank, kind: Kind, rank: int | float) -> Kept | None:
    """The factors of a task's delta.

    Args:
        base: the base's tensor.
        given: the expert's tensor, or its delta as two thin matrices.
        kind: how the tensor acts on activations.
        rank: how many triplets, or below 1 the share of energy to keep.

    Returns:
        None where the delta is zero.
    """
    change = None
    if isinstance(given, LowRank):
        factors = lora_svd(given.b, given.a)
        total = float(factors.s.double().square().sum())
        if isinstance(rank, float):
            shares = factors.s.double().square().cumsum(0)
            rank = int((shares < rank * total).sum()) + 1
    else:
        change = to_matrix(delta(base, given), kind)
        total = float(change.double().square().sum())
        if total == 0.0:
            return None
        factors = truncated_svd(change, energy_rank(change, rank) if isinstance(rank, float) else rank)
    if total == 0.0:
        return None
    # Directions of a rank-deficient delta beyond its rank are rounding; in a merge they would push real ones aside.
    real = max(1, int((factors.s > _NOISE * factors.s[0]).sum()))
    k = min(int(rank) if rank >= 1 else factors.rank, factors.rank, real)
    cut = Factors(factors.u[:, :k].contiguous(), factors.s[:k].contiguous(), factors.v[:k].contiguous())
    lost = float(factors.s[k:].double().square().sum()) if change is None else remaining_energy(change, cut)
    return Kept(cut, total**0.5, max(0.0, 1.0 - lost / total))


def similarity(tasks: Sequence[Factors], metric: str) -> Tensor:
    """Similarity (T, T) of the deltas that the redundancy filter compares."""
    if metric == "cosine":
        return cosine_matrix(tasks)
    matrix = torch.eye(len(tasks), dtype=torch.float64)
    for i, first in enumerate(tasks):
        for j, second in enumerate(tasks[:i]):
            matrix[i, j] = matrix[j, i] = principal_cosine(first, second)
    return matrix


def distinct(tasks: Sequence[Factors], redundancy: Redundancy | str) -> list[int]:
    """Positions of the tasks that the fixed model is made of, in order."""
    if isinstance(redundancy, str):
        return list(range(len(tasks)))
    return accept_distinct(similarity(tasks, redundancy.metric), redundancy.threshold)
