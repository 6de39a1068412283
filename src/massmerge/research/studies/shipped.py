"""How the bundle itself routes the samples: by its own first pass, router, score and candidates, as `predict` does.

What its voters say of every sample is kept, so that any threshold, size of a set and batch can be tried on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from massmerge.model.answers import Routing
from massmerge.model.load import Runtime
from massmerge.model.route.decide import Choice, CloserLook, Router, Votes, cast_votes, decide
from massmerge.model.route.first_pass import FirstPass, Voter
from massmerge.research.studies.book import AnswerBook
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.scores import measured
from massmerge.routing import Activation


@dataclass(frozen=True)
class Looks:
    """What the voters of the first look say of every sample, and those of the closer one if there is one."""

    first: Votes
    closer: Votes | None = None


def shipped_looks(context: StudyContext) -> Looks:
    """What the bundle's voters say of every sample."""
    runtime = context.runtime
    first = _votes(context, runtime.first_pass, lambda: runtime.routers, "the bundle's first pass")
    closer = runtime.closer
    if closer is None or len(context.tasks) < 2:
        return Looks(first)
    return Looks(first, _votes(context, closer.first_pass, lambda: closer.routers, "the bundle's second look"))


def looks_of(scores: Mapping[str, Tensor], voters: Sequence[Voter], closer: CloserLook | None = None) -> Looks:
    """The looks of other routers, from their scores (n, T) by the names of voters."""
    first = Votes([scores[voter.name] for voter in voters])
    return Looks(first, None if closer is None else Votes([scores[voter.name] for voter in closer.voters]))


def shipped_routings(
    context: StudyContext, looks: Looks | None = None, runtime: Runtime | None = None
) -> list[Routing]:
    """How every sample is routed by itself; the heads of candidates have decided where that leaves an input unclear.

    Args:
        context: the study's.
        looks: what voters say; the bundle's by default.
        runtime: the bundle with other options; as it is by default.
    """
    own = runtime or context.runtime
    return AnswerBook(context, own).settled(routed(own, looks or shipped_looks(context), own.voters))


def routed(
    runtime: Runtime, looks: Looks, voters: list[Voter], places: Tensor | None = None, *, shared: bool = False
) -> list[Routing]:
    """Routings of some samples, or with `shared` the one that they have together; no head has been asked.

    Args:
        runtime: the bundle with the options that are wanted.
        looks: what voters say of all samples.
        voters: those of the first look.
        places: of the samples; all of them by default.
        shared: whether there is one decision for all.
    """
    choice = Choice(
        runtime.tasks, list(range(len(runtime.tasks))), runtime.recipe.router, runtime.top_k, runtime.recipe.unknown
    )
    chosen = torch.arange(len(looks.first.scores[0])) if places is None else places

    def look(unsure: list[int]) -> Votes:
        assert looks.closer is not None
        return looks.closer.of(chosen if shared else chosen[unsure])

    closer = runtime.closer if looks.closer is not None else None
    return decide(looks.first.of(chosen), voters, closer, look, choice, shared=shared)


def best_of(context: StudyContext, routings: Sequence[Routing]) -> Tensor:
    """The position (n,) of the task that each sample is routed to; -1 where the bundle abstains."""
    return torch.tensor([context.tasks.index(r.selected[0]) if r.selected else -1 for r in routings])


def shipped_voters(context: StudyContext) -> list[Voter]:
    """Every voter that the bundle's decisions may ask."""
    closer = context.runtime.closer
    return list(dict.fromkeys([*context.runtime.voters, *(closer.voters if closer else ())]))


def _votes(context: StudyContext, first_pass: FirstPass, routers: Callable[[], list[Router]], what: str) -> Votes:
    def measure(seen: list[Activation]) -> dict[str, Tensor]:
        votes = cast_votes(seen, routers())
        scores = {voter.name: score for voter, score in zip(first_pass.voters, votes.scores, strict=True)}
        return scores if votes.lifts is None else {**scores, "lifts": votes.lifts}

    found = measured(context, lambda: first_pass, measure, {"votes": what}, what)
    return Votes([found[voter.name] for voter in first_pass.voters], found.get("lifts"))
