"""The paper's router: what remains of an activation after projection on each task's singular vectors. No data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from massmerge.linalg.task_sums import task_sums
from massmerge.routing.per_voter import VoterRouter

_CLOSE = 1e-3
# The first vectors of all tasks are close to what all inputs have in common, and tell little by themselves.
_LEAST_RANK = 4
Score = Literal["residual", "l1", "mahalanobis", "energy"]


class ProjectionRouter(VoterRouter):
    """Scores of one voter.

    Args:
        bases: for each task, orthonormal rows `v (k, d)`; k is the same for all, or 0 for a task that changes nothing here:
            a larger subspace holds more of any activation (see `of_common_rank`).
        score: `residual` is the length of what remains; `l1` its sum of absolute values; `mahalanobis` its length in the
            metric of all bases together; `energy` the captured length, negative so that less is better as with the others.
        alike: whether these bases are what is left of subspaces that were alike, and so tell less than others.
        targets: for each task the first one with the same expert, whose vectors count once in `mahalanobis`.
    """

    needs_fit, each_token, second_look = False, True, True

    @classmethod
    def load(cls, tensors: dict[str, Tensor], subspaces: ProjectionRouter) -> ProjectionRouter:
        """The subspaces themselves."""
        return subspaces

    def __init__(
        self,
        bases: list[Tensor],
        score: Score = "residual",
        *,
        alike: bool = False,
        targets: Sequence[int] | None = None,
    ) -> None:
        self.score, self.alike = score, alike
        self.ranks = [v.shape[0] for v in bases]
        self.stacked = torch.cat(bases)
        # One yardstick for all tasks: against its own size, a task with fewer vectors would look better than it is. Of a
        # task without any, whatever rounding leaves counts as nothing.
        chance = max(self.ranks, default=0) / self.stacked.shape[1]
        self._chance = torch.tensor([chance if rank else torch.inf for rank in self.ranks])
        counted = [bases[i] for i in (dict.fromkeys(targets) if targets else range(len(bases)))]
        self._whitener = mahalanobis_whitener(torch.cat(counted)) if score == "mahalanobis" else None

    @property
    def bases(self) -> list[Tensor]:
        """For each task its rows."""
        return list(torch.split(self.stacked, self.ranks))

    def captured(self, z: Tensor) -> Tensor:
        """`‖V_i z‖²` (batch, T), all tasks by one product."""
        return task_sums((z @ self.stacked.mT).square(), self.ranks)

    def lift(self, z: Tensor, scores: Tensor) -> Tensor:
        """How many times as much of each activation a task's subspace holds as a random one of the common rank (batch, T).

        Args:
            z: activations (batch, d).
            scores: what this router gave for them, from which the captured share follows without a second product.
        """
        length = z.square().sum(1, keepdim=True).clamp_min(1e-30)
        if self.score == "residual":
            captured = length - scores.square()
        elif self.score == "energy":
            captured = scores.square()
        else:
            captured = self.captured(z)
        return (captured / length).clamp_min(0) / self._chance

    def __call__(self, z: Tensor) -> Tensor:
        """Residuals (batch, T) of activations (batch, d); less is better."""
        if self.score in ("residual", "energy"):
            captured = self.captured(z)
            if self.score == "energy":
                return -captured.sqrt()
            # Pythagoras: V's rows are orthonormal, so nothing is projected back.
            length = z.square().sum(1, keepdim=True)
            squared = length - captured
            # Where almost nothing remains, the difference is rounding; those few inputs are projected back after all.
            close = (squared < _CLOSE * length).any(1)
            residuals = squared.clamp_min(0).sqrt()
            if bool(close.any()):
                residuals[close] = torch.stack([r.norm(dim=1) for r in self._remainders(z[close].double())], 1).to(
                    z.dtype
                )
            return residuals
        return torch.stack([self._measure(r) for r in self._remainders(z)], 1)

    def _measure(self, remainder: Tensor) -> Tensor:
        if self._whitener is None:
            return remainder.abs().sum(1)
        return torch.linalg.vector_norm(remainder @ self._whitener, dim=1)

    def _remainders(self, z: Tensor) -> list[Tensor]:
        """What remains of the activations after projection on each task."""
        return [z - (z @ v.to(z.dtype).mT) @ v.to(z.dtype) for v in self.bases]


def mahalanobis_whitener(v: Tensor, ridge: float = 1e-3) -> Tensor:
    """`Σ^-½` (d, d) for the second moment `Σ = VᵀV / R` of all tasks' singular vectors `v (R, d)` together.

    The paper centres the vectors first. But the sign of a singular vector is arbitrary, so their mean is too; the second
    moment does not depend on signs. It has low rank where the tasks leave directions out; the ridge, a share of its mean,
    keeps it invertible.
    """
    double = v.double()
    values, vectors = torch.linalg.eigh(double.mT @ double / max(1, v.shape[0]))
    values = values.clamp_min(0) + ridge * values.mean().clamp_min(1e-12)
    return ((vectors * values.rsqrt()) @ vectors.mT).to(v.dtype)


def of_common_rank(bases: list[Tensor], most: int | None = None) -> list[Tensor]:
    """The first vectors of each task, as many as the smallest task that changes something has, but at least four.

    Args:
        bases: for each task, orthonormal rows `v (k, d)`, the largest singular value first.
        most: no more than this; see `Recipe.routing_rank`.
    """
    rank = min((len(v) for v in bases if len(v)), default=0)
    rank = max(_LEAST_RANK, rank if most is None else min(rank, most))
    return [v[:rank] for v in bases]


def site_basis(stacked: list[tuple[Tensor, Tensor]], rank: int) -> Tensor:
    """Right singular vectors (k, d) of a task's deltas at a site.

    Args:
        stacked: `s (k)` and `v (k, d)` of each layer that reads the site's input; their deltas are stacked on each other.
        rank: how many vectors at most, for a stack of several layers.
    """
    if len(stacked) == 1:
        return stacked[0][1].float()
    # The left factors are orthonormal, so the stack has the row space and spectrum of the scaled v's.
    rows = torch.cat([s.float()[:, None] * v.float() for s, v in stacked])
    if 2 * rows.shape[0] <= rows.shape[1]:  # as LAPACK does it too, but in a third of its time for a few rows
        q, r = torch.linalg.qr(rows.mT)
        _, s, v = torch.linalg.svd(r.mT)
        return v[: _real(s, rank)] @ q.mT
    _, s, v = torch.linalg.svd(rows, full_matrices=False)
    return v[: _real(s, rank)]


def _real(s: Tensor, most: int) -> int:
    """How many of the singular values are not rounding, at most so many."""
    return min(most, int((s > 1e-6 * s[0]).sum()))
