"""Adapts a bundle's routing to mixed inputs without names, if they say that it gets better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massmerge.errors import InputError
from massmerge.io.tensor_file import read_tensors
from massmerge.model.estimate import decided
from massmerge.model.load import load
from massmerge.model.model import Model
from massmerge.model.router_file import FittedRouter, replace_router
from massmerge.model.seen import Seen, Step, look_at, subspaces_at
from massmerge.routing import vote
from massmerge.routing.adapted import ADAPTED, AdaptedRouter, adapted_tensors, fit_adapted
from massmerge.routing.router import Router
from massmerge.routing.routers import find_router
from massmerge.routing.two_views import agreement, better, mutual_information

MOST = 3200  # inputs that are read unless more are asked for
LEAST = 100
"""Fewer inputs are no traffic to learn from."""
WAYS: dict[str, dict[str, bool]] = {
    "standardised and smoothed": {"standardized": True, "smooth": True},
    "smoothed": {"standardized": False, "smooth": True},
    "standardised": {"standardized": True, "smooth": False},
}


@dataclass(frozen=True)
class Adaptation:
    """What was tried on the inputs, and whether the bundle has changed.

    Attributes:
        way: what the bundle does now; none if nothing is better than to leave it.
        inputs: how many inputs there were.
        judged_by: `names` of inputs whose task is known, else `agreement` of two halves of the voters.
        before: the share of right tasks, or of inputs on which the halves agree, as the bundle was.
        tried: the same for each way, on inputs that were left out.
    """

    way: str | None
    inputs: int
    judged_by: str
    before: float
    tried: dict[str, float]

    def plain(self) -> dict[str, Any]:
        """The adaptation as plain data."""
        return asdict(self)


def adapt(
    path: str | Path,
    inputs: Iterable[Any] | Path,
    *,
    check: Mapping[str, Iterable[Any]] | None = None,
    count: int = MOST,
    device: str = "auto",
    dtype: str = "auto",
    progress: Step = lambda name: None,
) -> Adaptation:
    """Learn what is usual from mixed inputs whose tasks nobody knows, and route by it from then on if that is better.

    Args:
        path: the bundle. It is replaced as a whole by one with the router, or left as it is.
        inputs: inputs of all tasks, in about the mixture that comes in use; or the file of a service's reservoir.
        check: some inputs of each task to judge by. Without them two halves of the voters must agree on more of the inputs
            than before, by more than chance, and tell as much of each other.
        count: how many inputs are used at most.
        device: where to run, as in `load`.
        dtype: the type to run in, as in `load`.
        progress: called for each input that is read.

    Raises:
        InputError: too few inputs, one that cannot be read, a file of another bundle, or a bundle with a single task.
        MassError: another command is writing the bundle, it has changed meanwhile, or the disk is full.
    """

    def fit(opened: Path) -> tuple[Adaptation, FittedRouter | None]:
        """What came of it, and the router that is stored; none if it is not better."""
        model = load(opened, router="projection", device=device, dtype=dtype, check=True)
        if len(model.tasks) < 2:
            raise InputError(f"{path}: one task needs no routing.")
        looks = _traffic(model, inputs, count, progress)
        size = len(looks[0].activations[0])
        if size < LEAST:
            raise InputError(f"{size} inputs are too few to tell what is usual: give {LEAST} or more.")
        done = _judged(model, looks, _named(model, check, progress))
        if done.way is None:
            return done, None
        tensors = {
            f"{ADAPTED}.{name}": tensor
            for look in looks
            for name, tensor in adapted_tensors(
                look.names, fit_adapted(look.activations, look.subspaces, **WAYS[done.way])
            ).items()
        }
        return done, FittedRouter(ADAPTED, tensors)

    return replace_router(path, fit)[0]


def _traffic(model: Model, inputs: Iterable[Any] | Path, count: int, step: Step) -> list[Seen]:
    """What each look sees of the inputs."""
    if not isinstance(inputs, Path):
        return list(look_at(model, {"inputs": list(islice(inputs, count))}, step))
    kept = dict(read_tensors(inputs))
    looks = [look for look in (model.stages.first, model.stages.second) if look is not None]
    voters = [voter for look in looks for voter in look.voters]
    size = next((len(rows) for rows in kept.values() if rows.ndim == 2), 0)
    if any(v.name not in kept or kept[v.name].shape != (size, v.site.width) for v in voters):
        raise InputError(f"{inputs}: not the reservoir of a service with this bundle; its voters are others.")
    # One input of NaN, or too large for 16 bits, would be in every mean.
    usable = torch.stack([kept[voter.name].isfinite().all(1) for voter in voters]).all(0)
    return [
        Seen(look.voters, [kept[v.name][usable][:count].float() for v in look.voters], subspaces_at(model, look))
        for look in looks
    ]


def _named(model: Model, check: Mapping[str, Iterable[Any]] | None, step: Step) -> tuple[list[Seen], Tensor] | None:
    """What each look sees of inputs whose task is known, and the task of each."""
    if not check:
        return None
    model.core.positions(list(check))
    chosen = {task: list(islice(check.get(task, ()), MOST)) for task in model.tasks}
    owners = torch.tensor([t for t, items in enumerate(chosen.values()) for _ in items])
    if not len(owners):
        raise InputError("there are no inputs to check by.")
    return list(look_at(model, chosen, step)), owners


def _judged(model: Model, looks: list[Seen], named: tuple[list[Seen], Tensor] | None) -> Adaptation:
    """Every way, judged on inputs that were left out; the best of those that are better than none."""
    size = len(looks[0].activations[0])
    if named is not None:
        plain, tried = _right(model, looks, named, None), {way: _right(model, looks, named, way) for way in WAYS}
        best = max(tried, key=tried.__getitem__)
        return Adaptation(best if tried[best] > plain else None, size, "names", plain, tried)
    if len(looks[0].voters) < 2:
        raise InputError(
            "a single voter has no two halves that could agree: give some inputs of each task to check by."
        )
    before, views = _views(looks, None), {way: _views(looks, way) for way in WAYS}
    count = len(model.tasks)
    good = [way for way, found in views.items() if better(before, found, count)]
    best_way = max(good, key=lambda way: mutual_information(*views[way], count), default=None)
    tried = {way: agreement(found) for way, found in views.items()}
    return Adaptation(best_way, size, "agreement", agreement(before), tried)


def _router(look: Seen, rows: Tensor, way: str | None) -> Router:
    """The router of a look that was adapted in some way to some of its inputs; or that of the subspaces."""
    if way is None:
        return find_router("projection").load(look.names, {}, look.subspaces)
    kept = fit_adapted([z[rows] for z in look.activations], look.subspaces, **WAYS[way])
    return AdaptedRouter(kept, look.subspaces)


def _right(model: Model, looks: list[Seen], named: tuple[list[Seen], Tensor], way: str | None) -> float:
    """The routing accuracy on inputs whose task is known, tasks counting alike."""
    known, owners = named
    everything = torch.arange(len(looks[0].activations[0]))
    routers = [_router(look, everything, way) for look in looks]
    routings = decided(model.stages, known, routers, torch.arange(len(owners)))
    right = torch.tensor([model.tasks[t] == r.selected[0] for t, r in zip(owners.tolist(), routings, strict=True)])
    return float(torch.stack([right[owners == t].float().mean() for t in set(owners.tolist())]).mean())


def _views(looks: list[Seen], way: str | None) -> tuple[Tensor, Tensor]:
    """What two halves of the voters decide about inputs that they were not adapted to, look by look."""
    one, other = (torch.cat([_decisions(look.of(half), way) for look in looks]) for half in (0, 1))
    return one, other


def _decisions(look: Seen, way: str | None) -> Tensor:
    """The task of each input (n,), by a router that was adapted to the other half of the inputs."""
    places = torch.arange(len(look.activations[0]))
    found = torch.zeros_like(places)
    for half in (0, 1):
        asked = places % 2 == half
        votes = look.votes(_router(look, places[~asked], way), places[asked])
        found[asked] = vote(votes.scores).argmin(1)
    return found
