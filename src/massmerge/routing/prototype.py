"""A router that knows the mean activation of a few unlabelled inputs of each task."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


def fit_prototypes(activations: Tensor, owners: Tensor, tasks: int) -> Tensor:
    """Mean of the normalised activations of each task (T, d)."""
    units = normalize(activations, dim=1)
    return torch.stack([units[owners == t].mean(0) for t in range(tasks)])


class PrototypeRouter:
    """Scores of one voter: the cosine distance to each task's prototype; less is better."""

    def __init__(self, prototypes: Tensor) -> None:
        # What all tasks share says nothing about which one it is.
        self._centre = prototypes.mean(0)
        self._prototypes = normalize(prototypes - self._centre, dim=1)

    def __call__(self, z: Tensor) -> Tensor:
        """Distances (batch, T) of activations (batch, d)."""
        return 1 - normalize(normalize(z, dim=1) - self._centre, dim=1) @ self._prototypes.mT
