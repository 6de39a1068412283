"""The mathematics of the method: plain functions over tensors.

Letters are the paper's. `u (m, k)`, `s (k,)`, `v (k, n)` are the factors of one delta; rows of `v` are the task
singular vectors. Nothing here knows a file or a task name; results are on the device of what they are made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from massmerge.linalg.lapack import top_eigh
from massmerge.linalg.task_sums import task_sums

# A Gram matrix squares the spectrum, so float32 loses directions below sqrt(6e-8) of the largest singular value.
# Factors whose last kept value falls below this share of the first are computed again from a float64 Gram matrix.
_FLOAT32_RANGE = 5e-3
# Spectra with an effective rank above this share of the full one are flat: a float32 Gram matrix serves them as it is.
_FLAT = 0.3
# From this share of the rank on, the partial solver has no advantage over a full SVD.
_FULL_SVD_SHARE = 0.5
# Rounding mixes neighbouring eigenvectors most. This many more than asked for are computed, so that the k-th and its
# neighbours are told apart by the exact factoring of the projection, not by the Gram matrix.
_MARGIN = 16
# Eigenvalues of a Gram matrix of unit vectors below this are noise: the direction is in the others' span. Two tasks
# that share a direction then share it in the merge as well, instead of amplifying rounding errors.
_GRAM_FLOOR = 1e-12
# Bases whose Gram matrix has no eigenvalue below this share of their mean keep 3e-6 in float32, which is twice as fast.
_FLOAT32_GRAM = 1e-2
_BLOCK_ROWS = 4096


class Factors(NamedTuple):
    """A truncated SVD: `u (m, k)` and `v (k, n)` orthonormal, `s (k,)` non-negative and falling."""

    u: Tensor
    s: Tensor
    v: Tensor

    @property
    def rank(self) -> int:
        """Number of singular triplets."""
        return self.s.shape[0]

    def first(self, k: int) -> Factors:
        """The k largest triplets, in memory of their own."""
        return Factors(self.u[:, :k].contiguous(), self.s[:k].contiguous(), self.v[:k].contiguous())

    def dense(self) -> Tensor:
        """The product `u diag(s) v` (m, n)."""
        return (self.u * self.s) @ self.v


def truncated_svd(a: Tensor, k: int) -> Factors:
    """The k largest singular triplets of `a (m, n)`, to a relative error of 1e-4 or better.

    Low ranks come from the top eigenvectors of the smaller Gram matrix, which LAPACK finds alone; the projection on
    them is then factored exactly, so `u` and `v` are orthonormal whatever the spectrum.

    >>> f = truncated_svd(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 2)
    >>> [round(x, 4) for x in f.s.tolist()]
    [3.0, 2.0]
    """
    m, n = a.shape
    if not 1 <= k <= min(m, n):
        raise ValueError(f"rank {k} is not between 1 and {min(m, n)}, the smaller side of a {m}×{n} matrix")
    if a.dtype not in (torch.float32, torch.float64):
        a = a.float()
    if m < n:
        v, s, u = truncated_svd(a.mT, k)
        return Factors(u.mT.contiguous(), s, v.mT.contiguous())
    if k > _FULL_SVD_SHARE * n:
        u, s, v = torch.linalg.svd(a, full_matrices=False)
        return Factors(u[:, :k].contiguous(), s[:k].contiguous(), v[:k].contiguous())
    scale = a.abs().max()
    if scale == 0:
        u, v = (torch.eye(*shape, dtype=a.dtype, device=a.device) for shape in ((m, k), (k, n)))
        return Factors(u, a.new_zeros(k), v)
    # Deltas can be as small as 1e-6 per entry; their squares leave float32's comfortable range.
    basis = _top_right_vectors(a / scale, k)
    left, r = torch.linalg.qr(a @ basis.mT)
    if basis.shape[0] == k:
        u_small, s, v_small = torch.linalg.svd(r)
        return Factors(left @ u_small, s, v_small @ basis)
    # One power step. A float32 Gram matrix leaks distant, smaller directions into the basis; each product with `a`
    # scales them down again, and every error after it is that of a full SVD in float32. A flat spectrum has none.
    right, r = torch.linalg.qr(a.mT @ left)
    v_small, s, u_small = torch.linalg.svd(r)
    return Factors(left @ u_small[:k].mT, s[:k].clone(), (right @ v_small[:, :k]).mT.contiguous())


def _top_right_vectors(a: Tensor, k: int) -> Tensor:
    """An orthonormal basis (p, n) that holds the top-k right singular space of a tall `a (m, n)`.

    p is k for a flat spectrum, of which the Gram matrix gives the very space, and larger for one that falls.
    """
    gram = a.mT @ a
    effective_rank = float(gram.trace().double() ** 2 / gram.double().square().sum())
    p = k if effective_rank > _FLAT * a.shape[1] else min(k + _MARGIN, a.shape[1])
    values, vectors = _top_eigh(gram, p)
    if a.dtype == torch.float32 and values[k - 1] < _FLOAT32_RANGE**2 * values[0]:
        double = a.double()
        _, vectors = _top_eigh(double.mT @ double, p)
    return vectors.to(a.dtype)


def _top_eigh(gram: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest eigenvalues of a symmetric matrix, largest first, and their eigenvectors as rows.

    On a GPU there is no partial solver, and the full one is faster than the way to the CPU and back.
    """
    if gram.device.type == "cpu":
        values, vectors = map(torch.from_numpy, top_eigh(gram.numpy(), k))
        return values, vectors
    values, vectors = torch.linalg.eigh(gram)
    return values[-k:].flip(0), vectors[:, -k:].mT.flip(0)


def remaining_energy(a: Tensor, f: Factors) -> float:
    """`‖a − u diag(s) v‖²`, what factors leave of `a (m, n)`: summed in float64, a block of rows at a time.

    Singular values cannot tell: those of a float32 SVD of a tall matrix are off by 1e-5, and so is the sum of their squares.
    """
    blocks = zip(torch.split(a, _BLOCK_ROWS), torch.split(f.u, _BLOCK_ROWS), strict=True)
    return sum(float((rows - (u * f.s) @ f.v).double().square().sum()) for rows, u in blocks)


def energy_rank(a: Tensor, share: float) -> int:
    """The smallest rank whose truncation keeps at least `share` of the squared norm of `a`; at least 1."""
    double = a.double()
    gram = double.mT @ double if a.shape[0] >= a.shape[1] else double @ double.mT
    energy = torch.linalg.eigvalsh(gram).flip(0).clamp_min(0).cumsum(0)
    return min(int((energy < share * energy[-1]).sum()) + 1, len(energy))


def lora_svd(b: Tensor, a: Tensor) -> Factors:
    """Factors of the product `b (m, r) @ a (r, n)` from two thin QRs and an r×r SVD; the product is never formed."""
    q_b, r_b = torch.linalg.qr(b.float())
    q_a, r_a = torch.linalg.qr(a.float().mT)
    u, s, v = torch.linalg.svd((r_b.double() @ r_a.double().mT), full_matrices=False)
    return Factors(q_b @ u.to(q_b.dtype), s.to(q_b.dtype), v.to(q_a.dtype) @ q_a.mT)


def _inverse_root_eigh(gram: Tensor) -> tuple[Tensor, Tensor]:
    """`values^-½ (R,)`, 0 for null directions, and eigenvectors `(R, R)` of a semi-definite matrix, in float64."""
    values, vectors = torch.linalg.eigh(gram.double())
    kept = values > _GRAM_FLOOR * values[-1].clamp_min(0)
    return torch.where(kept, values, torch.inf).rsqrt(), vectors


def inverse_sqrt(gram: Tensor) -> Tensor:
    """`gram^-½` (R, R) of a positive semi-definite matrix, in float64; null directions stay null.

    Concatenated bases of several tasks reach condition numbers of 1e3 to 1e6, so their Gram matrices need float64.
    """
    scale, vectors = _inverse_root_eigh(gram)
    return (vectors * scale) @ vectors.mT


def polar_factor(x: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns to a tall `x (m, R)`, `x (xᵀx)^-½` (for a wide one: rows).

    Null directions of `x` stay null, where a full SVD would fill them arbitrarily: equal columns get equal shares.
    """
    if x.shape[0] < x.shape[1]:
        return polar_factor(x.mT).mT
    if (gram := _safe_float32_gram(x)) is not None:
        values, vectors = torch.linalg.eigh(gram)
        return ((x @ vectors) * values.rsqrt()) @ vectors.mT
    double = x.double()
    scale, vectors = _inverse_root_eigh(double.mT @ double)
    # Only the product that is divided by small values needs float64; its columns are orthonormal, the rest is rotation.
    return ((double @ vectors) * scale).to(x.dtype) @ vectors.mT.to(x.dtype)


def _safe_float32_gram(x: Tensor) -> Tensor | None:
    """`xᵀx` of a tall float32 `x (m, R)` if its inverse root needs no float64: no eigenvalue is small beside their mean."""
    m, r = x.shape
    # Even bases that share nothing but chance have eigenvalues down to this.
    if x.dtype != torch.float32 or (1 - math.sqrt(r / m)) ** 2 < _FLOAT32_GRAM:
        return None
    gram = x.mT @ x
    # All eigenvalues are above the bound if the matrix less the bound still has a Cholesky factor, a matter of moments.
    lowered = gram - torch.diag((_FLOAT32_GRAM * gram.diagonal().mean()).expand(r))
    return gram if int(torch.linalg.cholesky_ex(lowered).info) == 0 else None


def core_matrix(tasks: Sequence[Factors], dtype: torch.dtype | None = None) -> Tensor:
    """The core `C (R, R)` of a TSV-M merge: `polar(U) S polar(V) = U C V`, `C = (UᵀU)^-½ S (VVᵀ)^-½`.

    `U` and `V` are the concatenated bases, R the sum of the ranks. For one task the core is `diag(s)`, exactly. Entries
    of the core grow with the condition of the bases, and so do rounding errors of `U C V`: for the few tasks of a
    selected set they are those of float32, for all tasks at full rank they reach 1e-3, which is why `tsv_merge` does
    without the core.
    """
    s = torch.cat([f.s for f in tasks])
    dtype = dtype or s.dtype
    if len(tasks) == 1:
        return torch.diag(s).to(dtype)
    u = torch.cat([f.u for f in tasks], 1).double()
    v = torch.cat([f.v for f in tasks], 0).double()
    return ((inverse_sqrt(u.mT @ u) * s.double()) @ inverse_sqrt(v @ v.mT)).to(dtype)


def quick_core(tasks: Sequence[Factors]) -> Tensor:
    """`core_matrix` for the few tasks of a selected set, while an answer waits for it: in float32, by products alone.

    Bases of tasks that share little have Gram matrices near the identity, where Newton's iteration needs a handful of
    products. Where it does not come to rest the tasks share much, and the core is computed by eigenvalues after all.
    """
    u, v = torch.cat([f.u for f in tasks], 1).float(), torch.cat([f.v for f in tasks], 0).float()
    left, right = _newton_inverse_sqrt(u.mT @ u), _newton_inverse_sqrt(v @ v.mT)
    if left is None or right is None:
        return core_matrix(tasks)
    s = torch.cat([f.s for f in tasks])
    return ((left * s) @ right).to(s.dtype)


def weighted_core(tasks: Sequence[Factors], weights: Sequence[float]) -> Tensor:
    """The core of the paper's weighted TSV: each task's `u` and `v` are scaled by its weight before they are merged.

    Polar factors take a common scale out again, and so the weights of directions that no other task shares: weights decide
    who keeps a direction that several tasks want. A weight of nothing beside the largest adds nothing.
    """
    largest = max(weights)
    scaled = [Factors(f.u * (w / largest), f.s, f.v * (w / largest)) for f, w in zip(tasks, weights, strict=True)]
    scale = torch.cat([f.s.new_full(f.s.shape, w / largest) for f, w in zip(tasks, weights, strict=True)])
    return scale[:, None] * quick_core(scaled) * scale


def _newton_inverse_sqrt(gram: Tensor, steps: int = 9, rest: float = 5e-6) -> Tensor | None:
    """`gram^-½` by the coupled Newton-Schulz iteration; none where it does not come to rest."""
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    y, z = gram, identity
    for _ in range(steps):
        product = z @ y
        if float((product - identity).abs().max()) < rest:
            return z
        half = 1.5 * identity - 0.5 * product
        y, z = y @ half, half @ z
    return None


def tsv_merge(tasks: Sequence[Factors]) -> Tensor:
    """TSV-M (m, n): concatenated factors, both bases replaced by their polar factors, scaling 1."""
    if len(tasks) == 1:
        return tasks[0].dense()
    u = torch.cat([f.u for f in tasks], 1)
    v = torch.cat([f.v for f in tasks], 0)
    return (polar_factor(u) * torch.cat([f.s for f in tasks])) @ polar_factor(v)


def cosine_matrix(tasks: Sequence[Factors]) -> Tensor:
    """Cosines (T, T) between the flattened deltas `u s v`, from the factors alone; 0 with a delta that is zero.

    `⟨U_i S_i V_i, U_j S_j V_j⟩ = Σ (S_i U_iᵀU_j S_j) ∘ (V_i V_jᵀ)`, a sum over the block (i, j) of an R×R product,
    which is made some rows at a time.
    """
    scaled = torch.cat([f.u * f.s for f in tasks], 1)
    v, ranks = torch.cat([f.v for f in tasks], 0), [f.rank for f in tasks]
    step, rows = max(1, _BLOCK_ROWS // max(1, *ranks)), list[Tensor]()
    for start in range(0, len(tasks), step):
        begin, own = sum(ranks[:start]), ranks[start : start + step]
        end = begin + sum(own)
        products = (scaled[:, begin:end].mT @ scaled) * (v[begin:end] @ v.mT)
        rows.append(task_sums(task_sums(products.double(), ranks).mT, own).mT)
    inner = torch.cat(rows).cpu()
    norms = inner.diagonal().clamp_min(0).sqrt()
    product = norms[:, None] * norms[None, :]
    cosines = torch.where(product > 0, inner / product.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    # A matrix product rounds (i, j) and (j, i) differently; the filter must not depend on which one it reads.
    return ((cosines + cosines.mT) / 2).clamp(-1, 1)


def principal_cosine(a: Factors, b: Factors) -> float:
    """Cosine of the largest angle between two deltas' column spaces: 1 if one holds the other, 0 with a zero one."""
    overlap = _column_space(a).mT @ _column_space(b)
    return min(float(torch.linalg.svdvals(overlap).min()), 1.0) if overlap.numel() else 0.0


def _column_space(f: Factors) -> Tensor:
    """The columns of `u` that the delta reaches; beyond the rank of the delta the others are arbitrary."""
    return f.u[:, f.s > torch.finfo(f.s.dtype).eps * max(f.u.shape[0], f.v.shape[1]) * f.s[:1]]


def similarity(tasks: Sequence[Factors], metric: str) -> Tensor:
    """Similarity (T, T) of the deltas that the redundancy filter compares."""
    if metric == "cosine":
        return cosine_matrix(tasks)
    matrix = torch.eye(len(tasks), dtype=torch.float64)
    for i, first in enumerate(tasks):
        for j, second in enumerate(tasks[:i]):
            matrix[i, j] = matrix[j, i] = principal_cosine(first, second)
    return matrix


def accept_distinct(similarity: Tensor, threshold: float) -> list[int]:
    """The paper's redundancy filter: in order, a task too similar to an accepted one is left out.

    Args:
        similarity: (T, T), cosines of the deltas or of their principal angles.
        threshold: ε; a task is left out if its similarity is above it.
    """
    accepted: list[int] = []
    for i, row in enumerate(similarity.tolist()):
        if all(row[j] <= threshold for j in accepted):
            accepted.append(i)
    return accepted
