"""Obviously right twins of the mathematics: dense matrices, full SVDs, float64, no shortcut.

The library is checked against these. They are slow on purpose: nothing here knows a Gram matrix or a partial solver.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Triplets = tuple[Tensor, Tensor, Tensor]


def svd(a: Tensor, k: int) -> Triplets:
    """The first k triplets `u (m, k)`, `s (k,)`, `v (k, n)` of a full SVD."""
    u, s, v = torch.linalg.svd(a.double(), full_matrices=False)
    return u[:, :k], s[:k], v[:k]


def truncated_product(a: Tensor, k: int) -> Tensor:
    """The best approximation of rank k to `a` (m, n)."""
    u, s, v = svd(a, k)
    return u @ torch.diag(s) @ v


def polar(x: Tensor, floor: float = 1e-6) -> Tensor:
    """The polar factor `P Q` of `x = P D Q`, without the directions whose singular value is below `floor` of the first.

    Those directions are noise and a full SVD fills them arbitrarily, so the polar factor is unique only without them.
    """
    p, d, q = torch.linalg.svd(x.double(), full_matrices=False)
    kept = d > floor * d[0]
    return p[:, kept] @ q[kept]


def tsv_merge(tasks: Sequence[Triplets]) -> Tensor:
    """TSV-M: concatenate the factors, replace both bases by their polar factors, multiply."""
    u = polar(torch.cat([u for u, _, _ in tasks], 1))
    s = torch.cat([s for _, s, _ in tasks]).double()
    v = polar(torch.cat([v for _, _, v in tasks], 0))
    return u @ torch.diag(s) @ v


def weighted_tsv_merge(tasks: Sequence[Triplets], weights: Sequence[float]) -> Tensor:
    """The paper's weighted TSV: left and right singular vectors of each task times its weight, then TSV-M."""
    return tsv_merge([(u * w, s, v * w) for (u, s, v), w in zip(tasks, weights, strict=True)])


def core_product(tasks: Sequence[Triplets], core: Tensor) -> Tensor:
    """`U C V` from the concatenated bases; it should be the TSV-M merge."""
    u = torch.cat([u for u, _, _ in tasks], 1).double()
    v = torch.cat([v for _, _, v in tasks], 0).double()
    return u @ core.double() @ v


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine between two flattened deltas; 0 if one is zero."""
    a, b = a.double().flatten(), b.double().flatten()
    norms = a.norm() * b.norm()
    return float(a @ b / norms) if norms > 0 else 0.0


def cosines(deltas: Sequence[Tensor]) -> Tensor:
    """Cosines (T, T) between flattened deltas."""
    return torch.tensor([[cosine(a, b) for b in deltas] for a in deltas], dtype=torch.float64)


def distinct(deltas: Sequence[Tensor], threshold: float) -> list[int]:
    """The redundancy filter: skip a delta whose cosine with an accepted one is strictly above the threshold."""
    accepted: list[int] = []
    for i, delta in enumerate(deltas):
        redundant = False
        for j in accepted:
            redundant = redundant or cosine(delta, deltas[j]) > threshold
        if not redundant:
            accepted.append(i)
    return accepted


def principal_cosine(a: Tensor, b: Tensor, floor: float = 1e-5) -> float:
    """Cosine of the largest principal angle between the column spaces of two deltas; 0 if one is zero."""

    def columns(x: Tensor) -> Tensor:
        u, s, _ = torch.linalg.svd(x.double(), full_matrices=False)
        return u[:, s > floor * s[0]]

    overlaps = torch.linalg.svdvals(columns(a).mT @ columns(b))
    return float(overlaps.min()) if len(overlaps) else 0.0


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius distance as a share of the norm of `want`; the distance itself if that is zero."""
    norm = want.double().norm()
    distance = (got.double() - want.double()).norm()
    return float(distance / norm) if norm > 0 else float(distance)
