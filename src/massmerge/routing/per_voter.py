"""Routers that score what each voter sees by itself; the votes are counted afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from massmerge.routing.activation import Activation
from massmerge.routing.depth import mean_lift
from massmerge.routing.router import Router, RouterKind, Scores

if TYPE_CHECKING:
    from massmerge.routing.projection import ProjectionRouter


class VoterRouter(ABC):
    """Scores of one voter."""

    needs_fit = True
    """As in `RouterKind`."""
    second_look = False
    """As in `RouterKind`."""
    each_token = False
    """Whether it looks at an input's tokens one by one; else at one activation of each input."""

    @classmethod
    def fit(cls, z: Tensor, owners: Tensor, subspaces: ProjectionRouter) -> dict[str, Tensor]:
        """What is kept of activations `z (n, d)` of the tasks `owners (n,)`; `subspaces` are the tasks' at the same site."""
        return {}

    @classmethod
    @abstractmethod
    def load(cls, tensors: dict[str, Tensor], subspaces: ProjectionRouter) -> VoterRouter:
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


class VotingRouter(Router):
    """Every voter's router has a vote.

    Args:
        routers: of each voter; tokens of one site may share one.
        voters: their names.
    """

    def __init__(self, routers: Sequence[VoterRouter], voters: Sequence[str]) -> None:
        self.routers, self.voters = list(routers), list(voters)

    def __call__(self, seen: list[Activation]) -> Scores:
        """The opinion of each voter."""
        taken = [a if r.each_token else Activation(a.pooled()) for r, a in zip(self.routers, seen, strict=True)]
        everything = self._scores(taken)
        lifts = [
            a.averaged(lift)
            for r, a, s in zip(self.routers, taken, everything, strict=True)
            if (lift := r.lift(a.vectors, s)) is not None
        ]
        opinions = [a.averaged(s) for a, s in zip(taken, everything, strict=True)]
        return Scores(opinions, mean_lift(lifts, self.voters) if len(lifts) == len(self.routers) else None)

    def _scores(self, seen: list[Activation]) -> list[Tensor]:
        """What each voter's router gives; the vectors of a shared router are read once for all of its voters."""
        vectors = [a.vectors for a in seen]
        found: list[Tensor] = []
        for _, voters in groupby(range(len(self.routers)), key=lambda i: id(self.routers[i])):
            own = list(voters)
            router = self.routers[own[0]]
            together = router(torch.cat([vectors[i] for i in own]) if len(own) > 1 else vectors[own[0]])
            found += torch.split(together, [len(vectors[i]) for i in own])
        return found


class PerVoter(RouterKind):
    """A router for each voter, kept under the voter's name.

    Args:
        router: the class of a voter's router.
    """

    def __init__(self, router: type[VoterRouter]) -> None:
        self.router = router
        self.needs_fit, self.second_look = router.needs_fit, router.second_look

    def fit(
        self, voters: Sequence[str], seen: list[Tensor], owners: Tensor, subspaces: list[ProjectionRouter]
    ) -> dict[str, Tensor]:
        """What each voter's router keeps."""
        return {
            f"{voter}.{name}": tensor
            for voter, z, own in zip(voters, seen, subspaces, strict=True)
            for name, tensor in self.router.fit(z, owners, own).items()
        }

    def missing(self, voters: Sequence[str], kept: Iterable[str]) -> list[str]:
        """The voters without a router."""
        names = list(kept) if self.needs_fit else []
        return [v for v in voters if self.needs_fit and not any(name.startswith(f"{v}.") for name in names)]

    def load(self, voters: Sequence[str], kept: dict[str, Tensor], subspaces: list[ProjectionRouter]) -> VotingRouter:
        """The vote of all voters' routers."""
        return VotingRouter([
            self.router.load({n.removeprefix(f"{v}."): t for n, t in kept.items() if n.startswith(f"{v}.")}, own)
            for v, own in zip(voters, subspaces, strict=True)
        ], voters)  # fmt: skip
