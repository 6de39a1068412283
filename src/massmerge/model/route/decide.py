"""From what voters see to a decision: scores, weights, the selected set, and the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from massmerge.model.answers import Routing
from massmerge.model.route.first_pass import Voter
from massmerge.recipe import RouterOptions, Unknown
from massmerge.routing import Activation, agreements, margins, select, standardize, vote, weigh
from massmerge.routing.confidence import ConfidenceRule, task_probabilities
from massmerge.routing.router import Router


@dataclass(frozen=True)
class Choice:
    """What a decision is made among, and how.

    Attributes:
        tasks: names of all tasks.
        allowed: positions of those that may be chosen.
        options: how scores become weights and weights a set.
        top_k: K.
        unknown: when to choose none.
        rule: how evidence becomes confidence.
    """

    tasks: list[str]
    allowed: list[int]
    options: RouterOptions
    top_k: int
    unknown: Unknown
    rule: ConfidenceRule = ConfidenceRule()  # noqa: RUF009 - it is frozen


@dataclass(frozen=True)
class Votes:
    """What voters say of some inputs, before anything is decided.

    Attributes:
        voters: who says it.
        scores: of each voter, residuals (inputs, T); less is better.
        lifts: how many times as much of each activation a task holds as chance (inputs, T), the mean over voters; none where
            a router cannot tell.
    """

    voters: list[Voter]
    scores: list[Tensor]
    lifts: Tensor | None = None

    def of(self, inputs: Tensor) -> Votes:
        """The votes on some of the inputs."""
        lifts = None if self.lifts is None else self.lifts[inputs]
        return Votes(self.voters, [scores[inputs] for scores in self.scores], lifts)


@torch.inference_mode()
def cast_votes(voters: list[Voter], activations: list[Activation], routers: list[Router]) -> Votes:
    """What voters say of inputs.

    Args:
        voters: who they are.
        activations: what each voter sees.
        routers: for each voter what turns activations into scores.
    """
    seen = [a if r.each_token else Activation(a.pooled()) for r, a in zip(routers, activations, strict=True)]
    everything = _scores(routers, seen)
    scores = [a.averaged(s) for a, s in zip(seen, everything, strict=True)]
    lifts = [
        a.averaged(lift)
        for r, a, s in zip(routers, seen, everything, strict=True)
        if (lift := r.lift(a.vectors, s)) is not None
    ]
    return Votes(voters, scores, torch.stack(lifts).mean(0) if len(lifts) == len(routers) else None)


@torch.inference_mode()
def count_votes(votes: Votes, choice: Choice, *, shared: bool = False) -> list[Routing]:
    """The routing of each input, or one for all of them.

    Args:
        votes: what was said of the inputs.
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
    return _routings(residuals, weights, chosen, scores, lifts, votes.voters, choice)


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
    standings = standardize(torch.stack(scores)).mean(0).tolist()
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
                probabilities=dict(
                    zip(names, task_probabilities(standings[i], chosen[i][0], choice.rule), strict=True)
                ),
            )
        )
    return found


def _best_lifts(lifts: Tensor, best: list[int]) -> list[float]:
    """The lift of each input's best task; one decision may stand for several inputs, of which it is the mean."""
    index = torch.tensor(best).expand(len(lifts))
    found: list[float] = lifts.gather(1, index[:, None]).reshape(len(best), -1).mean(1).tolist()
    return found
