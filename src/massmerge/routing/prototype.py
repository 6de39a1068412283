"""A router that knows the mean activation of a few unlabelled inputs of each task, and the tasks' subspaces besides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from massmerge.routing.per_voter import VoterRouter
from massmerge.routing.projection import ProjectionRouter

_SHRINKAGE = 0.8  # a dozen inputs a task tell little about a covariance: most of it is taken as equal in all directions
# What the distance counts against the residual; anything from a half to one does as well, and from one and a half to three
# where subspaces are alike. Chosen on validation rows of text tasks, full fine-tunes and adapters.
SHARE, SHARE_ALIKE = 0.75, 2.0
_FLAT = 1e-6  # a spread below this is rounding

Residuals = Callable[[Tensor], Tensor]


def fit_prototypes(
    activations: Tensor, owners: Tensor, tasks: int, residuals: Residuals | None = None, share: float = SHARE
) -> dict[str, Tensor]:
    """What the router keeps: the tasks' mean activations, seen in the metric of the scatter within tasks.

    Directions in which the inputs of one task differ from each other say little about which task it is. This is a linear
    discriminant: the distance of `z` to a mean `p` is `½ pᵀ Σ⁻¹ p − zᵀ Σ⁻¹ p`, up to what is the same for all tasks.

    Args:
        activations: normalised to length 1 here (n, d).
        owners: task of each (n,).
        tasks: number of tasks, each with at least one activation.
        residuals: gives those of activations (n, d) for each task; none if the distance is to decide alone.
        share: what the distance counts, if the residual counts 1.

    Returns:
        `weight (T, d)`, the rows `Σ⁻¹ p`, and `offset (T,)`, half of `pᵀ Σ⁻¹ p`; with residuals also `scales (2,)`, by
        which a residual and a distance are multiplied so that their usual spreads over the tasks stand in a fixed ratio.
    """
    units = normalize(activations, dim=1).double()
    means = torch.stack([units[owners == t].mean(0) for t in range(tasks)])
    scatter = units - means[owners]
    covariance = scatter.mT @ scatter / len(units)
    variance = covariance.diagonal().mean()
    if variance > 0:
        shrunk = (1 - _SHRINKAGE) * covariance / variance + _SHRINKAGE * torch.eye(len(covariance), dtype=units.dtype)
        weight = torch.linalg.solve(shrunk, means.mT).mT
    else:  # one input a task: nothing is known of the scatter
        weight = means
    fitted = {"weight": weight.float().contiguous(), "offset": ((weight * means).sum(1) / 2).float()}
    if residuals is None:
        return fitted
    parts = ((residuals, 1.0), (PrototypeRouter(**fitted), share))
    return {**fitted, "scales": torch.tensor([counts * _scale(scores(units.float())) for scores, counts in parts])}


class PrototypeRouter(VoterRouter):
    """Scores of one voter: the distance to each task's prototype, together with the residual; less is better.

    A dozen inputs know less of a full fine-tune's task than its subspace does, but something else: a subspace does not know
    on which side of zero its inputs lie.

    Args:
        weight: as fitted.
        offset: as fitted.
        scales: as fitted; without them, as bundles of older versions have none, the distance decides alone.
        residuals: gives those of activations (n, d) for each task.
    """

    second_look = True

    @classmethod
    def fit(cls, z: Tensor, owners: Tensor, subspaces: ProjectionRouter) -> dict[str, Tensor]:
        """Prototypes, and scales that count them together with the residuals."""
        share = SHARE_ALIKE if subspaces.alike else SHARE
        return fit_prototypes(z, owners, len(subspaces.ranks), subspaces, share)

    @classmethod
    def load(cls, tensors: dict[str, Tensor], subspaces: ProjectionRouter) -> PrototypeRouter:
        """The router of these prototypes."""
        return cls(tensors["weight"], tensors["offset"], tensors.get("scales"), subspaces)

    def __init__(
        self, weight: Tensor, offset: Tensor, scales: Tensor | None = None, residuals: Residuals | None = None
    ) -> None:
        self._weight, self._offset, self._scales, self._residuals = weight, offset, scales, residuals

    def __call__(self, z: Tensor) -> Tensor:
        """Scores (batch, T) of activations (batch, d), up to what is the same for all tasks."""
        units = normalize(z, dim=1)
        residuals = None if self._scales is None or self._residuals is None else self._residuals(units)
        return self.beside(units, residuals)

    def beside(self, units: Tensor, residuals: Tensor | None) -> Tensor:
        """The same for activations of length 1, whose residuals are known; without them the distance decides alone."""
        distances = self._offset - units @ self._weight.mT
        if self._scales is None or residuals is None:
            return distances
        return self._scales[0] * residuals + self._scales[1] * distances


def _scale(scores: Tensor) -> float:
    """What makes 1 of the usual spread of an input's scores (n, T) over the tasks; 0 where there is none."""
    spread = float(scores.std(1).mean()) if scores.shape[1] > 1 else 0.0
    return 1 / spread if spread > _FLAT else 0.0
