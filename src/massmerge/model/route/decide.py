"""From what voters see to a decision: scores, weights, the selected set, and the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from massmerge.model.answers import Routing
from massmerge.model.route.first_pass import Voter
from massmerge.recipe import RouterOptions, Unknown
from massmerge.routing import Activation, agreements, margins, select, vote, weigh
from massmerge.routing.confidence import ConfidenceRule, strengths, task_probabilities
from massmerge.routing.router import Router

_LAST_TURN = 0.5  # chosen on validation rows, see docs/results/llm.md


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
        targets: for each task the first one with the same expert; none where the router can tell such tasks apart.
    """

    tasks: list[str]
    allowed: list[int]
    options: RouterOptions
    top_k: int
    unknown: Unknown
    rule: ConfidenceRule
    targets: list[int] | None = None

    @property
    def routed(self) -> dict[int, list[str]]:
        """Positions of the tasks that are decided among; each with the names of all that share its expert, its own first."""
        found: dict[int, list[int]] = {}
        for task in self.allowed:
            found.setdefault(self.targets[task] if self.targets else task, []).append(task)
        return {tasks[0]: [self.tasks[t] for t in tasks] for tasks in found.values()}


@dataclass(frozen=True)
class Votes:
    """What voters say of some inputs, before anything is decided.

    Attributes:
        voters: who says it.
        scores: of each voter, residuals (inputs, T), or of all together; less is better.
        lifts: how many times as much of each activation a task holds as chance (inputs, T), the mean over voters; none where
            a router cannot tell.
        probable: whether there is one opinion, a negative log-probability, whose size counts.
    """

    voters: list[Voter]
    scores: list[Tensor]
    lifts: Tensor | None = None
    probable: bool = False

    def of(self, inputs: Tensor) -> Votes:
        """The votes on some of the inputs."""
        lifts = None if self.lifts is None else self.lifts[inputs]
        return Votes(self.voters, [scores[inputs] for scores in self.scores], lifts, self.probable)


@torch.inference_mode()
def cast_votes(voters: list[Voter], activations: list[Activation], router: Router) -> Votes:
    """What voters say of inputs.

    Args:
        voters: who they are.
        activations: what each voter sees.
        router: what turns that into scores.
    """
    scores = router(activations)
    opinions = torch.stack(scores.opinions).cpu()  # in one copy; what is decided by them is small
    return Votes(voters, list(opinions), None if scores.lifts is None else scores.lifts.cpu(), scores.probable)


def with_last_turns(votes: Votes, places: list[int], turns: Votes) -> Votes:
    """Votes on conversations in which the last turns count too, half as much as the whole.

    A whole conversation stays with the task that it began with, which is right for *and this one?* and wrong for another
    request; the last turn alone is the other way round.

    Args:
        votes: on whole conversations, and on other inputs.
        places: which of them have a last turn of their own.
        turns: votes on these turns.
    """
    scores = [whole.clone() for whole in votes.scores]
    for whole, last in zip(scores, turns.scores, strict=True):
        whole[places] = (whole[places] + _LAST_TURN * last) / (1 + _LAST_TURN)
    return replace(votes, scores=scores)


@torch.inference_mode()
def count_votes(votes: Votes, choice: Choice, *, shared: bool = False) -> list[Routing]:
    """The routing of each input, or one for all of them.

    Args:
        votes: what was said of the inputs.
        choice: what is decided among.
        shared: make one decision, by the mean of the inputs' scores.
    """
    routed = list(choice.routed)
    scores = [s[:, routed] for s in votes.scores]
    if shared:
        scores = [s.mean(0, keepdim=True) for s in scores]
    residuals = vote(scores)
    options = choice.options
    standardized = options.standardize and not votes.probable
    weights = weigh(residuals, standardized=standardized, temperature=options.temperature)
    chosen = select(weights, options.threshold, choice.top_k)
    lifts = None if votes.lifts is None else _best_lifts(votes.lifts, [routed[c[0]] for c in chosen])
    agreed, leads = _certainty(scores, chosen, weights if votes.probable else None)
    strong = strengths(scores, probable=votes.probable).tolist()
    probable = [task_probabilities(row, own[0], choice.rule) for row, own in zip(strong, chosen, strict=True)]
    return _routings(residuals, weights, chosen, lifts, agreed, leads, probable, votes.voters, choice)


def _certainty(
    scores: list[Tensor], chosen: list[list[int]], probabilities: Tensor | None
) -> tuple[list[float], list[float | None]]:
    """How far voters agree on each input's best task, and how far that is ahead; None where there is no other.

    A router that gives probabilities is asked for these: agreement is the best task's, the lead is in log-odds.
    """
    alone = scores[0].shape[1] < 2
    if probabilities is None:
        return agreements(scores, [c[0] for c in chosen]), [None] * len(chosen) if alone else [*margins(scores)]
    best = scores[0].topk(1 if alone else 2, largest=False).values
    return probabilities.amax(1).tolist(), [None] * len(chosen) if alone else (best[:, 1] - best[:, 0]).tolist()


def _routings(
    residuals: Tensor,
    weights: Tensor,
    chosen: list[list[int]],
    lifts: list[float] | None,
    agreed: list[float],
    leads: list[float | None],
    probable: list[list[float]],
    voters: list[Voter],
    choice: Choice,
) -> list[Routing]:
    names = list(choice.routed.values())
    site = " ".join(voter.name for voter in voters)
    found = []
    for i, (left, share) in enumerate(zip(residuals.tolist(), weights.tolist(), strict=True)):
        lift = None if lifts is None else lifts[i]
        abstains = (lift is not None and lift < choice.unknown.lift) or agreed[i] < choice.unknown.agreement
        found.append(
            Routing(
                _of_all(names, left),
                _of_all(names, share),
                [] if abstains else [name for c in chosen[i] for name in names[c]][: choice.top_k],
                site,
                lift,
                agreed[i],
                leads[i],
                probabilities=_of_all(names, [p / len(own) for p, own in zip(probable[i], names, strict=True)]),
            )
        )
    return found


def _of_all(names: list[list[str]], values: list[float]) -> dict[str, float]:
    """The value of each task; those that share an expert share its value."""
    return {name: value for several, value in zip(names, values, strict=True) for name in several}


def _best_lifts(lifts: Tensor, best: list[int]) -> list[float]:
    """The lift of each input's best task; one decision may stand for several inputs, of which it is the mean."""
    index = torch.tensor(best).expand(len(lifts))
    found: list[float] = lifts.gather(1, index[:, None]).reshape(len(best), -1).mean(1).tolist()
    return found
