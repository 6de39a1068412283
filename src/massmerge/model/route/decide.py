"""From what voters see to a decision: scores, weights, the selected set, and the evidence for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from massmerge.model.answers import Routing
from massmerge.model.route.first_pass import FirstPass, Voter
from massmerge.recipe import RouterOptions, Unknown
from massmerge.routing import Activation, agreements, margins, select, vote, weigh
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


@dataclass(frozen=True)
class Votes:
    """What voters say of some inputs, before anything is decided.

    Attributes:
        scores: of each voter, residuals (inputs, T); less is better.
        lifts: how many times as much of each activation a task holds as chance (inputs, T), the mean over voters; none where
            a router cannot tell.
    """

    scores: list[Tensor]
    lifts: Tensor | None = None

    def of(self, inputs: Tensor) -> Votes:
        """The votes on some of the inputs."""
        return Votes([s[inputs] for s in self.scores], None if self.lifts is None else self.lifts[inputs])


@torch.inference_mode()
def cast_votes(activations: list[Activation], routers: list[Router]) -> Votes:
    """What voters say of inputs.

    Args:
        activations: what each voter sees.
        routers: for each voter what turns activations into scores.
    """
    # Only projection looks at tokens one by one; the fitted routers know one activation of each input.
    seen = [
        a if isinstance(r, ProjectionRouter) else Activation(a.pooled())
        for r, a in zip(routers, activations, strict=True)
    ]
    everything = _scores(routers, seen)
    scores = [a.averaged(s) for a, s in zip(seen, everything, strict=True)]
    lifts = [
        a.averaged(r.lift(a.vectors, s))
        for r, a, s in zip(routers, seen, everything, strict=True)
        if isinstance(r, ProjectionRouter)
    ]
    return Votes(scores, torch.stack(lifts).mean(0) if len(lifts) == len(routers) else None)


@torch.inference_mode()
def count_votes(votes: Votes, voters: list[Voter], choice: Choice, *, shared: bool = False) -> list[Routing]:
    """The routing of each input, or one for all of them.

    Args:
        votes: of these voters.
        voters: who they are.
        choice: what is decided among.
        shared: make one decision, by the mean of the inputs' scores.
    """
    scores = [s[:, choice.allowed] for s in votes.scores]
    if shared:
        scores = [s.mean(0, keepdim=True) for s in scores]
    residuals = vote(scores)
    options = choice.options
    weights = weigh(residuals, standardized=options.standardize, temperature=options.temperature)
    chosen = select(weights, options.threshold, choice.top_k)
    lifts = None if votes.lifts is None else _best_lifts(votes.lifts, [choice.allowed[c[0]] for c in chosen])
    return _routings(residuals, weights, chosen, scores, lifts, voters, choice)


def decide(
    first: Votes,
    voters: list[Voter],
    closer: CloserLook | None,
    look: Callable[[list[int]], Votes],
    choice: Choice,
    *,
    shared: bool = False,
) -> list[Routing]:
    """Routings by the first look, and by the closer one where that is not sure.

    Args:
        first: what the voters of the first look say.
        voters: who they are.
        closer: those of the closer look, if there is one.
        look: gives what they say of the inputs at some positions, or of all inputs where the decision is shared.
        choice: what is decided among.
        shared: make one decision for all inputs.
    """
    routings = count_votes(first, voters, choice, shared=shared)
    best = [choice.tasks.index(min(r.residuals, key=r.residuals.__getitem__)) for r in routings]
    unsure = closer.needed([r.margin for r in routings], best, choice.allowed) if closer else []
    if closer is not None and unsure:
        for i, routing in zip(unsure, count_votes(look(unsure), closer.voters, choice, shared=shared), strict=True):
            routings[i] = routing
    return routings


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


def _best_lifts(lifts: Tensor, best: list[int]) -> list[float]:
    """The lift of each input's best task; one decision may stand for several inputs, of which it is the mean."""
    index = torch.tensor(best).expand(len(lifts))
    found: list[float] = lifts.gather(1, index[:, None]).reshape(len(best), -1).mean(1).tolist()
    return found
