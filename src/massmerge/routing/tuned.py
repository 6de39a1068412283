"""A router that reads a tuned first pass: low-rank factors change the base so that a linear layer can name the task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from massmerge.errors import InputError
from massmerge.routing.activation import Activation
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.router import Router, RouterKind, Scores

TUNED = "tuned"
ADAPTER = "adapter."
"""Stands before the names of the factors, behind which `.down` or `.up` follows."""


def task_logits(seen: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor) -> Tensor:
    """Logits (n, T) from what some voters see (n, width), with weights (T, width) of each and a bias (T,)."""
    parts = [z @ w.mT for z, w in zip(seen, weights, strict=True)]
    return torch.stack(parts).sum(0) + bias


class TunedRouter(Router):
    """One opinion of all voters that it reads: negative log-probabilities.

    Args:
        places: positions of these voters.
        weights: of each of them (T, width).
        bias: (T,).
    """

    def __init__(self, places: Sequence[int], weights: Sequence[Tensor], bias: Tensor) -> None:
        self._places, self._weights, self._bias = list(places), list(weights), bias

    def __call__(self, seen: list[Activation]) -> Scores:
        """The negative log-probability of each task."""
        read = [seen[place].pooled() for place in self._places]
        return Scores([-log_softmax(task_logits(read, self._weights, self._bias), 1)], probable=True)


class TunedKind(RouterKind):
    """Trained with the first pass itself, by `mass calibrate --kind tuned`."""

    probable = True

    def fit(
        self, voters: Sequence[str], seen: list[Tensor], owners: Tensor, subspaces: list[ProjectionRouter]
    ) -> dict[str, Tensor]:
        """Refused: what voters of the plain base see is not enough.

        Raises:
            InputError: always.
        """
        raise InputError("the router tuned changes the first pass: `mass calibrate --kind tuned` trains it.")

    def missing(self, voters: Sequence[str], kept: Iterable[str]) -> list[str]:
        """All voters, if nothing was kept for any of them."""
        names = set(kept)
        return [] if any(f"{voter}.weight" in names for voter in voters) else list(voters)

    def load(self, voters: Sequence[str], kept: dict[str, Tensor], subspaces: list[ProjectionRouter]) -> TunedRouter:
        """The router of what was trained."""
        places = [i for i, voter in enumerate(voters) if f"{voter}.weight" in kept]
        return TunedRouter(places, [kept[f"{voters[i]}.weight"].float() for i in places], kept["bias"].float())


def adapter_deltas(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the factors add to each weight (m, n): `up (m, r) @ down (r, n)`."""
    names = [name[len(ADAPTER) : -len(".up")] for name in kept if name.startswith(ADAPTER) and name.endswith(".up")]
    return {
        name: kept[f"{ADAPTER}{name}.up"].float() @ kept[f"{ADAPTER}{name}.down"].float()
        for name in names
        if f"{ADAPTER}{name}.down" in kept
    }
