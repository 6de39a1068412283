"""A router that knows the mean activation of a few unlabelled inputs of each task."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

_SHRINKAGE = 0.8  # a dozen inputs a task tell little about a covariance: most of it is taken as equal in all directions


def fit_prototypes(activations: Tensor, owners: Tensor, tasks: int) -> dict[str, Tensor]:
    """What the router keeps: the tasks' mean activations, seen in the metric of the scatter within tasks.

    Directions in which the inputs of one task differ from each other say little about which task it is. This is a linear
    discriminant: the distance of `z` to a mean `p` is `½ pᵀ Σ⁻¹ p − zᵀ Σ⁻¹ p`, up to what is the same for all tasks.

    Args:
        activations: normalised to length 1 here (n, d).
        owners: task of each (n,).
        tasks: number of tasks, each with at least one activation.

    Returns:
        `weight (T, d)`, the rows `Σ⁻¹ p`, and `offset (T,)`, half of `pᵀ Σ⁻¹ p`.
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
    return {"weight": weight.float().contiguous(), "offset": ((weight * means).sum(1) / 2).float()}


class PrototypeRouter:
    """Scores of one voter: the distance to each task's prototype; less is better."""

    def __init__(self, weight: Tensor, offset: Tensor) -> None:
        self._weight, self._offset = weight, offset

    def __call__(self, z: Tensor) -> Tensor:
        """Distances (batch, T) of activations (batch, d), up to what is the same for all tasks."""
        return self._offset - normalize(z, dim=1) @ self._weight.mT
