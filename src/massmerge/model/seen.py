"""What voters see of inputs whose task is known, from the inputs themselves or from what was kept of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from massmerge.errors import InputError
from massmerge.model.model import Model
from massmerge.model.route.bases import SiteBases
from massmerge.model.route.decide import Votes, cast_votes
from massmerge.model.route.first_pass import FirstPass, Voter
from massmerge.model.route.stages import Look
from massmerge.model.route.voters import subspaces_of
from massmerge.routing import Activation
from massmerge.routing.moments import replay
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.router import Router, place_of
from massmerge.routing.routers import find_router

Step = Callable[[str], None]


@dataclass(frozen=True)
class Seen:
    """What the voters of one look see of some inputs.

    Attributes:
        voters: who they are.
        activations: of each voter (n, width).
        subspaces: the tasks' for each voter.
    """

    voters: list[Voter]
    activations: list[Tensor]
    subspaces: list[ProjectionRouter]

    @property
    def names(self) -> list[str]:
        """The voters' names."""
        return [voter.name for voter in self.voters]

    def of(self, half: int) -> Seen:
        """Every second voter, from the first or the second on."""
        return Seen(self.voters[half::2], self.activations[half::2], self.subspaces[half::2])

    def fit(self, kind: str, rows: Tensor, owners: Tensor) -> dict[str, Tensor]:
        """What a router of a kind keeps of some of the inputs."""
        return find_router(kind).fit(self.names, [z[rows] for z in self.activations], owners[rows], self.subspaces)

    def router(self, kind: str, rows: Tensor, owners: Tensor) -> Router:
        """The router that is fitted on some of the inputs."""
        return find_router(kind).load(self.names, self.fit(kind, rows, owners), self.subspaces)

    def votes(self, router: Router, rows: Tensor) -> Votes:
        """What a router says of some of the inputs."""
        return cast_votes(self.voters, [Activation(z[rows]) for z in self.activations], router)


def look_at(model: Model, chosen: Mapping[str, Sequence[Any]], step: Step) -> Iterator[Seen]:
    """What each look sees of the inputs."""
    stages = model.stages
    for look in (stages.first, stages.second):
        if look is not None:
            yield Seen(look.voters, see(model, look.first_pass, chosen, step), subspaces_at(model, look))


def subspaces_at(model: Model, look: Look) -> list[ProjectionRouter]:
    """The tasks' subspaces for each voter of a look."""
    options, folder = model.stages.options, model.core.reader.folder
    bases, second = SiteBases(model.sets.tensors), look is model.stages.second
    return subspaces_of(look.voters, bases, options, look.first_pass, folder, second=second)


def see(model: Model, first_pass: FirstPass, chosen: Mapping[str, Sequence[Any]], step: Step) -> list[Tensor]:
    """What each voter of a pass sees of the inputs (n, width), in their order."""

    def stepping(task: str, items: Sequence[Any]) -> Iterator[Any]:
        """The inputs, each told as done when the next is asked for."""
        for item in items:
            yield item
            step(task)

    found: list[list[Tensor]] = [[torch.zeros(0, voter.site.width) for voter in first_pass.voters]]
    for task, items in ((task, items) for task, items in chosen.items() if items):
        try:
            found.append(model.activations(stepping(task, items), first_pass=first_pass))
        except InputError as error:
            raise InputError(f"inputs of {task}: {error}") from None
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def refuse_without(model: Model, chosen: dict[str, list[Any]], stored: dict[str, dict[str, Tensor]]) -> tuple[str, ...]:
    """The tasks without inputs, for which what is stored of earlier ones stands in.

    Raises:
        InputError: nothing of use is stored of one of them.
    """
    empty = [task for task, items in chosen.items() if not items]
    looks = [look.voters for look in (model.stages.first, model.stages.second) if look is not None]
    for voters in looks if empty else ():
        kept = stored.get(place_of([voter.name for voter in voters]))
        wide = kept is not None and kept["means"].shape[1] == sum(voter.site.width for voter in voters)
        known = model.tasks[: len(kept["means"])] if kept is not None and wide else []
        lacking = [task for task in empty if task not in known]
        if lacking:
            other = (
                " What is kept of earlier inputs is of other sites than those that vote now."
                if stored and not wide
                else ""
            )
            raise InputError(f"no inputs for {', '.join(lacking)}. Every task needs some; a dozen is enough.{other}")
    return tuple(empty)


def filled(
    look: Seen, chosen: dict[str, list[Any]], stored: dict[str, dict[str, Tensor]], most: int
) -> tuple[Seen, Tensor]:
    """A look with what stands in for the inputs of tasks that have none, and the task of each input."""
    widths, begun = [z.shape[1] for z in look.activations], 0
    parts: list[list[Tensor]] = []
    for task, items in enumerate(chosen.values()):
        own = [z[begun : begun + len(items)] for z in look.activations]
        parts.append(own if items else replay(stored[place_of(look.names)], task, widths, most))
        begun += len(items)
    owners = torch.tensor([task for task, own in enumerate(parts) for _ in own[0]])
    return Seen(look.voters, [torch.cat(zs) for zs in zip(*parts, strict=True)], look.subspaces), owners
