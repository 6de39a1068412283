"""What every router is: activations in, a score for each task out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from massmerge.routing.projection import ProjectionRouter


class Router(ABC):
    """Scores of one voter."""

    needs_fit = True
    """Whether it is fitted on inputs of each task (`mass calibrate`) before it can be loaded."""
    each_token = False
    """Whether it looks at an input's tokens one by one; else at one activation of each input."""
    second_look = False
    """Whether unclear images are looked at a second time by it."""

    @classmethod
    def fit(cls, z: Tensor, owners: Tensor, subspaces: ProjectionRouter) -> dict[str, Tensor]:
        """What is kept of activations `z (n, d)` of the tasks `owners (n,)`; `subspaces` are the tasks' at the same site."""
        return {}

    @classmethod
    @abstractmethod
    def load(cls, tensors: dict[str, Tensor], subspaces: ProjectionRouter) -> Router:
        """The router of what `fit` has kept, and of the tasks' subspaces."""

    @abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """Scores (batch, T) of activations (batch, d); less is better."""

    def lift(self, z: Tensor, scores: Tensor) -> Tensor | None:
        """How many times as much of each activation a task holds as chance would (batch, T), if the router can tell.

        Args:
            z: activations (batch, d).
            scores: what this router gave for them.
        """
        return None
