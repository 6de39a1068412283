"""Isotropic merging (Marczak et al., 2025): Iso-C and Iso-CTS, a delta whose singular values are all equal."""

from __future__ import annotations

import torch
from torch import Tensor

from massmerge.linalg.factors import Factors, polar_factor, truncated_svd
from massmerge.merging.static.deltas import Deltas

# Directions below this share of the first are rounding: a sum of low rank has them, and they must not be made as large.
_NOISE = 1e-6


def iso_c(deltas: Deltas) -> Tensor:
    """The sum of all deltas with every singular value replaced by their mean."""
    u, s, v = _real_directions(deltas.sum(), min(deltas.shape))
    return s.mean() * (u @ v) if len(s) else deltas.zeros()


def iso_cts(deltas: Deltas, *, common: float) -> Tensor:
    """Directions of the sum of all deltas, then each task's own that those do not hold; equal singular values.

    Args:
        deltas: matrices (m, n).
        common: the share of the min(m, n) directions that come from the sum; what is left is divided among the tasks.
    """
    full = min(deltas.shape)
    own = round((full - int(common * full)) / deltas.count)
    if own == 0:
        return iso_c(deltas)
    parts = [_real_directions(deltas.sum(), max(0, full - own * deltas.count))]
    shared = parts[0].u
    for _, delta in deltas:
        parts.append(_real_directions(delta - shared @ (shared.mT @ delta), own))
    u, s, v = torch.cat([p.u for p in parts], 1), torch.cat([p.s for p in parts]), torch.cat([p.v for p in parts])
    return s.mean() * (polar_factor(u) @ polar_factor(v)) if len(s) else deltas.zeros()


def _real_directions(matrix: Tensor, most: int) -> Factors:
    """At most so many of the first singular triplets, those of rounding left out; none of a zero matrix."""
    if most == 0 or not bool(matrix.any()):
        return Factors(matrix[:, :0], matrix.new_zeros(0), matrix[:0])
    u, s, v = truncated_svd(matrix, most)
    k = int((s > _NOISE * s[0]).sum())
    return Factors(u[:, :k], s[:k], v[:k])
