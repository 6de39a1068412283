"""From what voters see to a decision: scores, weights, the selected set, and the evidence for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from massmerge.answers import Routing
from massmerge.recipe import RouterOptions, Unknown
from massmerge.routing import Activation, FirstPass, Voter, agreements, margins, select, vote, weigh
from massmerge.routing.projection import ProjectionRouter

Router = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Choice:
    """What a decision is made among, and how.

    Attributes:
        tasks: names of all tasks.
        allowed: positions of those that may be chosen.
        options: how scores become weights and weights a set.
        top_k: K.
        unknown: when to choose none.
    """

    tasks: list[str]
    allowed: list[int]
    options: RouterOptions
    top_k: int
    unknown: Unknown


class CloserLook:
    """Voters of all blocks, for inputs of which those of the first blocks are not sure.

    Args:
        first_pass: a pass up to the last of these voters.
        make_routers: makes their routers, when an input needs them for the first time.
        kin: which tasks look alike to the first blocks (T, T), which can then not be sure of either.
        unsure: an input whose best task leads the next by less is looked at again.
    """

    def __init__(
        self, first_pass: FirstPass, make_routers: Callable[[], list[Router]], kin: Tensor, unsure: float
    ) -> None:
        self.first_pass, self._make = first_pass, make_routers
        self._kin, self._unsure = kin, unsure
        self._routers: list[Router] | None = None
        self._lock = threading.Lock()

    @property
    def voters(self) -> list[Voter]:
        """Who votes."""
        return self.first_pass.voters

    def needed(self, leads: Sequence[float | None], best: Sequence[int], allowed: Sequence[int]) -> list[int]:
        """Positions of the inputs that the first blocks are not sure of.

        Args:
            leads: how far the best task of each is ahead; None where there is no other.
            best: which task that is.
            allowed: the tasks that it was chosen among.
        """
        mistaken = self._kin[:, list(allowed)].any(1).tolist()
        return [
            i
            for i, (lead, task) in enumerate(zip(leads, best, strict=True))
            if lead is not None and (lead < self._unsure or mistaken[task])
        ]

    @property
    def routers(self) -> list[Router]:
        """The router of each voter."""
        with self._lock:
            if self._routers is None:
                self._routers = self._make()
            return self._routers


@torch.inference_mode()
def decide(
    activations: list[Activation], voters: list[Voter], routers: list[Router], choice: Choice, *, shared: bool = False
) -> list[Routing]:
    """The routing of each input, or one for all of them.

    Args:
        activations: what each voter sees.
        voters: who they are.
        routers: for each voter what turns activations into scores.
        choice: what is decided among.
        shared: make one decision, by the mean of the inputs' scores.
    """
    # Only projection looks at tokens one by one; the fitted routers know one activation of each input.
    seen = [
        a if isinstance(r, ProjectionRouter) else Activation(a.pooled())
        for r, a in zip(routers, activations, strict=True)
    ]
    everything = _scores(routers, seen)
    scores = [a.averaged(s)[:, choice.allowed] for a, s in zip(seen, everything, strict=True)]
    if shared:
        scores = [s.mean(0, keepdim=True) for s in scores]
    residuals = vote(scores)
    options = choice.options
    weights = weigh(residuals, standardized=options.standardize, temperature=options.temperature)
    chosen = select(weights, options.threshold, choice.top_k)
    lifts = _lifts(routers, seen, everything, [choice.allowed[c[0]] for c in chosen])
    return _routings(residuals, weights, chosen, scores, lifts, voters, choice)


def _scores(routers: list[Router], seen: list[Activation]) -> list[Tensor]:
    """What each voter's router gives; tokens of one site share a router, whose vectors are read once for all of them."""
    vectors = [a.vectors for a in seen]
    found: list[Tensor] = []
    for _, voters in groupby(range(len(routers)), key=lambda i: id(routers[i])):
        own = list(voters)
        together = routers[own[0]](torch.cat([vectors[i] for i in own]) if len(own) > 1 else vectors[own[0]])
        found += torch.split(together, [len(vectors[i]) for i in own])
    return found


def _routings(
    residuals: Tensor,
    weights: Tensor,
    chosen: list[list[int]],
    scores: list[Tensor],
    lifts: list[float] | None,
    voters: list[Voter],
    choice: Choice,
) -> list[Routing]:
    names = [choice.tasks[t] for t in choice.allowed]
    site = " ".join(voter.name for voter in voters)
    agreed = agreements(scores, [c[0] for c in chosen])
    leads = margins(scores) if len(names) > 1 else [None] * len(chosen)
    found = []
    for i, (left, share) in enumerate(zip(residuals.tolist(), weights.tolist(), strict=True)):
        lift = None if lifts is None else lifts[i]
        abstains = (lift is not None and lift < choice.unknown.lift) or agreed[i] < choice.unknown.agreement
        found.append(
            Routing(
                dict(zip(names, left, strict=True)),
                dict(zip(names, share, strict=True)),
                [] if abstains else [names[c] for c in chosen[i]],
                site,
                lift,
                agreed[i],
                leads[i],
            )
        )
    return found


def _lifts(routers: list[Router], seen: list[Activation], scores: list[Tensor], best: list[int]) -> list[float] | None:
    """How much more of each activation its best task holds than chance, the mean over voters."""
    found = [
        a.averaged(r.lift(a.vectors, s))
        for r, a, s in zip(routers, seen, scores, strict=True)
        if isinstance(r, ProjectionRouter)
    ]
    if len(found) < len(routers):
        return None
    together = torch.stack(found).mean(0)
    index = torch.tensor(best).expand(len(together))  # one decision may stand for several inputs
    lifts: list[float] = together.gather(1, index[:, None]).reshape(len(best), -1).mean(1).tolist()
    return lifts
