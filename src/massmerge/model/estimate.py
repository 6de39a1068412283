"""What a router will reach, estimated from inputs whose task is known: fitted on some of them, asked about the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from massmerge.linalg.intervals import Figure, mean_of, wilson
from massmerge.model.answers import Routing
from massmerge.model.model import Model
from massmerge.model.route.decide import Choice, Votes
from massmerge.model.route.stages import Stages
from massmerge.model.seen import Seen, Step
from massmerge.recipe import Unknown
from massmerge.routing.router import Router
from massmerge.routing.routers import find_router

FOLDS = 5
_CONFUSED = 0.03  # of a task's inputs: fewer that go to another are not worth a word
_MOST_PAIRS = 5
_MOST = 400  # inputs of a task that an estimate is made with; more would take long and change it little


@dataclass(frozen=True)
class ConfusedPair:
    """Inputs of a task that go to another."""

    task: str
    other: str
    share: float


@dataclass(frozen=True)
class Estimate:
    """The routing accuracy to expect.

    Attributes:
        mean: over the tasks, with its 95 % interval.
        tasks: of each task.
        confused: which tasks' inputs go where, the most frequent first.
    """

    mean: Figure
    tasks: dict[str, Figure]
    confused: list[ConfusedPair]

    def plain(self) -> dict[str, Any]:
        """The estimate as plain data."""
        return {
            "mean": self.mean._asdict(),
            "tasks": {task: figure._asdict() for task, figure in self.tasks.items()},
            "confused": [asdict(pair) for pair in self.confused],
        }


def folds(owners: Tensor, count: int = FOLDS) -> Iterator[tuple[Tensor, Tensor]]:
    """Places to fit on and places to ask about, every task divided alike; none if a task has but one input."""
    members = [torch.where(owners == task)[0] for task in sorted(set(owners.tolist()))]
    count = min(count, *map(len, members), len(owners))
    for fold in range(count if count > 1 else 0):
        asked = torch.cat([own[fold::count] for own in members])
        fitted = torch.ones(len(owners), dtype=torch.bool)
        fitted[asked] = False
        yield torch.where(fitted)[0], asked


def held_out_routings(
    stages: Stages, looks: Sequence[Seen], kind: str, owners: Tensor, step: Step = lambda name: None
) -> list[Routing] | None:
    """How each input is routed by a router of a kind that was fitted without it; none if a task has but one input.

    Candidates are not asked: they would need the heads. Probabilities are plain evidence, for a rule to be fitted to.

    Args:
        stages: those of the bundle.
        looks: what the first look sees of the inputs, and the second if there is one.
        kind: of the router; everything that is fitted is fitted anew for each fold.
        owners: task of each input (n,).
        step: called for each fold.
    """
    everything = torch.arange(len(owners))
    needs_fit = find_router(kind).needs_fit
    found: dict[int, Routing] = {}
    for fitted, asked in folds(owners) if needs_fit else [(everything, everything)]:
        routers = [look.router(kind, fitted, owners) for look in looks]
        for place, routing in zip(asked.tolist(), decided(stages, looks, routers, asked), strict=True):
            found[place] = routing
        step(kind)
    return [found[place] for place in range(len(owners))] if found else None


def plain_choice(stages: Stages) -> Choice:
    """What is decided among where nothing abstains, and the evidence itself is the probability."""
    return replace(stages.choice(unknown=Unknown()), rule=stages.rule.of_probabilities())


def decided(stages: Stages, looks: Sequence[Seen], routers: Sequence[Router], asked: Tensor) -> list[Routing]:
    """How routers of the looks route some of the inputs that these have seen."""

    def again(unsure: list[int]) -> Votes:
        """The votes of the second look."""
        return looks[1].votes(routers[1], asked[torch.tensor(unsure)])

    choice = plain_choice(stages)
    return stages.decide(looks[0].votes(routers[0], asked), again if len(looks) > 1 else None, choice)


def estimate(tasks: Sequence[str], owners: Tensor, routings: Sequence[Routing]) -> Estimate:
    """Routing accuracy from the routings of inputs whose task is known."""
    counts = torch.zeros(len(tasks), len(tasks), dtype=torch.long)
    for owner, routing in zip(owners.tolist(), routings, strict=True):
        counts[owner, tasks.index(routing.selected[0])] += 1
    figures = {task: wilson(int(counts[t, t]), int(counts[t].sum())) for t, task in enumerate(tasks)}
    pairs = [
        ConfusedPair(task, other, float(counts[t, o] / counts[t].sum()))
        for t, task in enumerate(tasks)
        for o, other in enumerate(tasks)
        if o != t
    ]
    confused = sorted((p for p in pairs if p.share >= _CONFUSED), key=lambda p: -p.share)[:_MOST_PAIRS]
    return Estimate(mean_of(list(figures.values())), figures, confused)


@dataclass(frozen=True)
class HeldOut:
    """How inputs of known task are routed by a router that was fitted without them.

    Attributes:
        rows: places of the inputs.
        owners: the true task of each.
        routings: of each, with plain evidence for probabilities.
        estimate: what that says of the router.
    """

    rows: Tensor
    owners: Tensor
    routings: list[Routing]
    estimate: Estimate

    @classmethod
    def of(cls, model: Model, owners: Tensor, rows: Tensor, routings: list[Routing]) -> HeldOut:
        """With the estimate."""
        return cls(rows, owners, routings, estimate(model.tasks, owners, routings))


def some_of(owners: Tensor, tasks: int) -> Tensor:
    """Places of no more inputs of each task than an estimate takes."""
    return torch.cat([torch.where(owners == task)[0][:_MOST] for task in range(tasks)])


def held_out(
    model: Model, looks: Sequence[Seen], owners: Tensor, kinds: Iterable[str], step: Step = lambda name: None
) -> dict[str, HeldOut]:
    """What is found without calibration (`projection`), and with each kind where inputs can be left out."""
    rows = some_of(owners, len(model.tasks))
    some = [Seen(look.voters, [z[rows] for z in look.activations], look.subspaces) for look in looks]
    found: dict[str, HeldOut] = {}
    for kind in ("projection", *kinds):
        own = some if find_router(kind).second_look else some[:1]
        routings = held_out_routings(model.stages, own, kind, owners[rows], step)
        if routings is not None:
            found[kind] = HeldOut.of(model, owners[rows], rows, routings)
    return found
