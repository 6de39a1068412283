"""A router that has seen mixed inputs without names: each task against what is usual for it, smoothed over neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from massmerge.linalg.factors import truncated_svd
from massmerge.routing.activation import Activation
from massmerge.routing.linear import residual_vote
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.router import Router, RouterKind, Scores, place_of

ADAPTED = "adapted"
NEIGHBOURS = 10
_DIRECTIONS = 64  # in which neighbours are looked for: those in which the inputs differ most
_RARE = 0.1  # of an even share of the inputs: a task that is found less often counts no more than this
_FLAT = 1e-6
_PARTS = ("centre", "spread", "middle", "directions", "bank", "scores")


def balanced_moments(vote: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread (T,) of each task's votes (n, T), as they would be if every task had equally many inputs.

    Inputs count by the task that the vote finds for them: traffic is seldom even, and without this the task that most of it
    belongs to would look usual, and lose it.
    """
    found, count = vote.argmin(1), vote.shape[1]
    counts = torch.bincount(found, minlength=count).float()
    weights = (1 / counts.clamp_min(_RARE * len(vote) / count))[found]
    weights = (weights / weights.sum())[:, None]
    centre = (weights * vote).sum(0)
    return centre, (weights * (vote - centre).square()).sum(0).sqrt().clamp_min(_FLAT)


def fit_adapted(
    seen: Sequence[Tensor], subspaces: list[ProjectionRouter], *, standardized: bool = True, smooth: bool = True
) -> dict[str, Tensor]:
    """What is kept of inputs whose task nobody knows.

    Args:
        seen: what each voter sees of them (n, width).
        subspaces: the tasks' for each voter.
        standardized: compare each task's residuals with what is usual for it.
        smooth: let neighbours among these inputs count.

    Returns:
        `centre (T,)` and `spread (T,)`; `middle (D,)` and `directions (r, D)` of the activations, all voters together; and
        of each input its place `bank (n, r)` along these and its `scores (n, T)`. Large ones in half precision.
    """
    units = [normalize(z.float(), dim=1) for z in seen]
    vote = residual_vote(units, subspaces)
    centre, spread = balanced_moments(vote) if standardized else (torch.zeros(vote.shape[1]), torch.ones(vote.shape[1]))
    together = torch.cat(units, 1)
    middle = together.mean(0)
    _, _, directions = truncated_svd(together - middle, min(_DIRECTIONS, *together.shape))
    kept = len(units[0]) if smooth else 0
    bank, scores = ((together - middle) @ directions.mT)[:kept], ((vote - centre) / spread)[:kept]
    large = {"middle": middle, "directions": directions, "bank": bank, "scores": scores}
    return {"centre": centre, "spread": spread} | {n: t.half().contiguous() for n, t in large.items()}


class AdaptedRouter(Router):
    """One opinion of all voters together: the vote of the residuals, standardised, with that of the nearest inputs known.

    Args:
        kept: as `fit_adapted` keeps it.
        subspaces: the tasks' for each voter.
    """

    def __init__(self, kept: Mapping[str, Tensor], subspaces: list[ProjectionRouter]) -> None:
        self._kept, self._subspaces = {name: kept[name].float() for name in _PARTS}, subspaces
        self._bank = normalize(self._kept["bank"], dim=1)

    def __call__(self, seen: list[Activation]) -> Scores:
        """An input counts as much as its neighbours together."""
        kept = self._kept
        units = [normalize(activation.pooled().float(), dim=1) for activation in seen]
        own = (residual_vote(units, self._subspaces) - kept["centre"]) / kept["spread"]
        if not len(self._bank):
            return Scores([own])
        places = normalize((torch.cat(units, 1) - kept["middle"]) @ kept["directions"].mT, dim=1)
        near = (places @ self._bank.mT).topk(min(NEIGHBOURS, len(self._bank)), dim=1).indices
        return Scores([(own + kept["scores"][near].mean(1)) / 2])


class Adapted(RouterKind):
    """One router for all voters, kept under the names of the first and the last; fitted by `mass adapt`."""

    second_look = True
    needs_names = False

    def fit(
        self, voters: Sequence[str], seen: list[Tensor], owners: Tensor, subspaces: list[ProjectionRouter]
    ) -> dict[str, Tensor]:
        """What is kept of the inputs, whoever owns them."""
        return adapted_tensors(voters, fit_adapted(seen, subspaces))

    def missing(self, voters: Sequence[str], kept: Iterable[str]) -> list[str]:
        """All voters, if the router was fitted for others."""
        return [] if f"{place_of(voters)}.bank" in list(kept) else list(voters)

    def load(self, voters: Sequence[str], kept: dict[str, Tensor], subspaces: list[ProjectionRouter]) -> AdaptedRouter:
        """The router of what was kept."""
        return AdaptedRouter({name: kept[f"{place_of(voters)}.{name}"] for name in _PARTS}, subspaces)


def adapted_tensors(voters: Sequence[str], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is kept, under the names of the voters."""
    return {f"{place_of(voters)}.{name}": tensor for name, tensor in kept.items()}
