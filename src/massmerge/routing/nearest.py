"""A router that keeps a support set of activations and asks for the nearest by cosine."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from massmerge.routing.per_voter import VoterRouter
from massmerge.routing.projection import ProjectionRouter


class NearestRouter(VoterRouter):
    """Scores of one voter: the cosine distance to the nearest support activation of each task; less is better.

    Args:
        support: activations (n, d).
        owners: task of each (n,).
        tasks: number of tasks, each with at least one activation.
    """

    @classmethod
    def fit(cls, z: Tensor, owners: Tensor, subspaces: ProjectionRouter) -> dict[str, Tensor]:
        """All activations."""
        return {"support": z, "owners": owners}

    @classmethod
    def load(cls, tensors: dict[str, Tensor], subspaces: ProjectionRouter) -> NearestRouter:
        """The router of these activations."""
        return cls(tensors["support"], tensors["owners"], len(subspaces.ranks))

    def __init__(self, support: Tensor, owners: Tensor, tasks: int) -> None:
        self._support = [normalize(support[owners == t], dim=1) for t in range(tasks)]

    def __call__(self, z: Tensor) -> Tensor:
        """Distances (batch, T) of activations (batch, d)."""
        units = normalize(z, dim=1)
        return torch.stack([1 - (units @ s.mT).amax(1) for s in self._support], 1)
