"""How the bundle itself routes the samples: by its own first pass, router, score and candidates, as `predict` does.

What its voters say of every sample is kept, so that any threshold, size of a set and batch can be tried on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from massmerge.model.answers import Routing
from massmerge.model.model import Model
from massmerge.model.route.decide import Votes, cast_votes
from massmerge.model.route.first_pass import Voter
from massmerge.model.route.stages import Look, Stages
from massmerge.research.studies.book import AnswerBook
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.scores import measured
from massmerge.routing import Activation


@dataclass(frozen=True)
class Looks:
    """What the voters of the first look say of every sample, and those of the second one if there is one."""

    first: Votes
    second: Votes | None = None


def shipped_looks(context: StudyContext) -> Looks:
    """What the bundle's voters say of every sample."""
    stages = context.model.stages
    first = _votes(context, stages.first, "the bundle's first pass")
    if stages.second is None or len(context.tasks) < 2:
        return Looks(first)
    return Looks(first, _votes(context, stages.second, "the bundle's second look"))


def looks_of(scores: Mapping[str, Tensor], voters: list[Voter], second: Look | None = None) -> Looks:
    """The looks of other routers, from their scores (n, T) by the names of voters."""
    found = [Votes(own, [scores[v.name] for v in own]) for own in (voters, *([second.voters] if second else []))]
    return Looks(*found)


def shipped_routings(context: StudyContext, looks: Looks | None = None, model: Model | None = None) -> list[Routing]:
    """How every sample is routed by itself; the heads of candidates have decided where that leaves an input unclear.

    Args:
        context: the study's.
        looks: what voters say; the bundle's by default.
        model: the bundle with other options; as it is by default.
    """
    own = model or context.model
    return AnswerBook(context, own).settled(routed(own.stages, looks or shipped_looks(context)))


def routed(stages: Stages, looks: Looks, places: Tensor | None = None, *, shared: bool = False) -> list[Routing]:
    """Routings of some samples, or with `shared` the one that they have together; no head has been asked.

    Args:
        stages: the bundle's, with the options that are wanted.
        looks: what voters say of all samples.
        places: of the samples; all of them by default.
        shared: whether there is one decision for all.
    """
    chosen = torch.arange(len(looks.first.scores[0])) if places is None else places
    second = looks.second

    def again(unsure: list[int]) -> Votes:
        """The votes of the second look."""
        assert second is not None
        return second.of(chosen if shared else chosen[unsure])

    return stages.decide(looks.first.of(chosen), again if second else None, stages.choice(), shared=shared)


def best_of(context: StudyContext, routings: Sequence[Routing]) -> Tensor:
    """The position (n,) of the task that each sample is routed to; -1 where the bundle abstains."""
    return torch.tensor([context.tasks.index(r.selected[0]) if r.selected else -1 for r in routings])


def shipped_voters(context: StudyContext) -> list[Voter]:
    """Every voter that the bundle's decisions may ask."""
    stages = context.model.stages
    return list(dict.fromkeys([*stages.voters, *(stages.second.voters if stages.second else ())]))


def _votes(context: StudyContext, look: Look, what: str) -> Votes:
    def measure(seen: list[Activation]) -> dict[str, Tensor]:
        """Each voter's scores, and the lifts where there are some."""
        votes = cast_votes(look.voters, seen, look.router)
        scores = {voter.name: score for voter, score in zip(look.voters, votes.scores, strict=True)}
        return scores if votes.lifts is None else {**scores, "lifts": votes.lifts}

    found = measured(context, lambda: look.first_pass, measure, {"votes": what}, what)
    return Votes(look.voters, [found[voter.name] for voter in look.voters], found.get("lifts"))
