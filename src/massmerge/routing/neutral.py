"""The router without data where adapters hardly left random starts of their own: tasks against what they hold of no task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from massmerge.routing.projection import ProjectionRouter

_TINY = 1e-30


class NeutralRouter(ProjectionRouter):
    """Scores of one voter: what a task holds of an activation, against what it holds of neutral ones; less is better.

    The subspace of an adapter that hardly left its random start holds, by chance, more or less of what all activations have
    in common, which is most of each. What counts is what it holds beyond that. Subspaces that were learned from inputs are
    compared with each other by their residuals, which tell more; with adapters only the best of them is.

    Args:
        bases: as in `ProjectionRouter`.
        neutral: activations of inputs that belong to no task (n, d), or what gives them when they are first needed.
        learned: tasks whose subspaces were learned.
        own: the router of those alone, at the rank that they have in common.
    """

    def __init__(
        self,
        bases: list[Tensor],
        neutral: Tensor | Callable[[], Tensor],
        learned: Sequence[int] = (),
        own: ProjectionRouter | None = None,
    ) -> None:
        super().__init__(bases, alike=True)  # they tell less than others, and prototypes count more beside them
        self._learned, self._neutral = list(learned), neutral
        self._own = own if len(self._learned) > 1 else None

    @cached_property
    def _usual(self) -> Tensor:
        """Of neutral activations the share that each task holds (T,)."""
        neutral = self._neutral() if callable(self._neutral) else self._neutral
        return self._share(neutral.to(self.stacked)).mean(0).clamp_min(torch.finfo(neutral.dtype).eps)

    def __call__(self, z: Tensor) -> Tensor:
        """Scores (batch, T) of activations (batch, d)."""
        held = -self._held(z).sqrt()
        if self._own is None:
            return held
        residuals, theirs = self._own(z), held[:, self._learned]
        least, best = residuals.min(1, keepdim=True)
        spread = theirs.std(1, keepdim=True) / residuals.std(1, keepdim=True).clamp_min(_TINY)
        held[:, self._learned] = theirs.gather(1, best) + (residuals - least) * spread
        return held

    def lift(self, z: Tensor, scores: Tensor) -> Tensor:
        """How many times as much of each activation a task holds as of neutral ones (batch, T)."""
        return scores.square() if self._own is None else self._held(z)  # such scores tell it without a product

    def _held(self, z: Tensor) -> Tensor:
        return self._share(z) / self._usual

    def _share(self, z: Tensor) -> Tensor:
        """Of each activation the share that a task's subspace holds (batch, T)."""
        return self.captured(z) / z.square().sum(1, keepdim=True).clamp_min(_TINY)
