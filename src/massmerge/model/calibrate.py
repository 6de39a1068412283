"""Fits the routers that need some unlabelled inputs a task, chooses among them, and keeps them in the bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massmerge.bundle.download import refuse_hub
from massmerge.bundle.kept_inputs import MOMENTS, kept_moments, moment_tensors
from massmerge.bundle.layout import LEFT_OVER, MANIFEST, ROUTER
from massmerge.bundle.manifest import read_manifest, sign_manifest
from massmerge.bundle.merge_folder import recover
from massmerge.bundle.reader import Bundle
from massmerge.bundle.watched_files import SourceFiles
from massmerge.bundle.work_folder import WorkFolder, in_words
from massmerge.errors import InputError
from massmerge.io.checksums import file_sha256
from massmerge.io.durable import link_tree
from massmerge.io.tensor_file import read_tensors, write_tensors
from massmerge.model.advice import advise
from massmerge.model.estimate import Estimate, Seen, estimate, held_out_routings
from massmerge.model.load import load
from massmerge.model.model import Model
from massmerge.model.route.first_pass import FirstPass
from massmerge.model.route.voters import subspaces_of
from massmerge.model.tune import TuneOptions, Tuning, leave_out, read_rows
from massmerge.recipe import Unknown
from massmerge.routing.moments import fit_moments, replay
from massmerge.routing.router import place_of
from massmerge.routing.routers import FITTED, find_router
from massmerge.routing.tuned import TUNED

MOST = 2000  # inputs of a task that are read unless more are asked for
AUTO = ("prototype", "linear")
KINDS = ("auto", *FITTED)
_ESTIMATED = 400  # inputs of a task that an estimate is made with; more would take long and change it little
Step = Callable[[str], None]


@dataclass(frozen=True)
class Calibration:
    """What a calibration has done, and what to expect of it.

    Attributes:
        kind: the router that the bundle has now.
        inputs: how many inputs of each task it was fitted on.
        before: the routing accuracy without calibration, on these inputs.
        after: the same with it, on inputs that were left out when it was fitted; none if a task has but one input.
        tried: the same of every kind that was tried.
        advice: what to do next.
        replayed: tasks without inputs, for which those of an earlier calibration stand in, as drawn from their mean and
            scatter; their figures are of these.
    """

    kind: str
    inputs: dict[str, int]
    before: Estimate
    after: Estimate | None
    tried: dict[str, Estimate]
    advice: list[str]
    replayed: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """The calibration as plain data."""
        return {
            "kind": self.kind,
            "inputs": self.inputs,
            "before": self.before.plain(),
            "after": None if self.after is None else self.after.plain(),
            "tried": {kind: found.mean._asdict() for kind, found in self.tried.items()},
            "advice": self.advice,
            "replayed": list(self.replayed),
        }


def calibrate(
    path: str | Path,
    inputs: Mapping[str, Iterable[Any]],
    *,
    kind: str = "auto",
    count: int = MOST,
    progress: Step = lambda name: None,
) -> Calibration:
    """Fit a router on inputs of each task and make it the bundle's.

    Args:
        path: the bundle. It is replaced as a whole by one with the router; all other files stay what they are.
        inputs: for each task some inputs of it; they need no labels. A task may have none if an earlier calibration had:
            the bundle keeps their mean and scatter, also when tasks are added or removed.
        kind: `auto` takes `linear` if it beats `prototype` by more than a standard error in cross-validation. `prototype`
            keeps the mean activation and counts it together with the subspaces; `linear` is a logistic regression on what
            all voters see; `nearest` keeps all activations; `mlp` trains a network on them;
            `tuned` trains an adapter of the first pass to name the task.
        count: how many inputs of each task are used at most.
        progress: called for each input that is read and each fold that is fitted.

    Returns:
        What was fitted, and the routing accuracy to expect, estimated by cross-validation.

    Raises:
        InputError: no router of that kind is fitted, a task is unknown or has no inputs, or one of them cannot be read.
        MassError: another command is writing the bundle, it has changed meanwhile, or the disk is full.
    """
    if kind not in KINDS:
        raise InputError(f"kind is one of {', '.join(KINDS)}, not {kind!r}.")
    refuse_hub(path)
    path = Path(path)
    recover(path)
    read_manifest(path)  # what is no bundle gets no folder beside it
    work = WorkFolder(path)
    with in_words(work.path), work.held():
        try:
            files = SourceFiles.of_bundle(path)
            done, fitted = files.settled(lambda: _fit(path, inputs, kind, count, progress))
            _write(path, work.fresh_result(), done.kind, fitted)
            work.publish(replacing=True)
        finally:
            work.discard()
    return done


def _fit(
    path: Path, inputs: Mapping[str, Iterable[Any]], kind: str, count: int, step: Step
) -> tuple[Calibration, dict[str, Tensor]]:
    """What was found out, and the tensors of the router that was chosen."""
    model = load(path, router="projection", check=True)
    model.core.positions(list(inputs) or None)
    chosen = {task: list(islice(inputs.get(task, ()), count)) for task in model.tasks}
    stored = {} if model.stages.options.first_pass == "fixed" else kept_moments(Bundle(path, check=False))
    empty = _refuse_without(model, chosen, {} if kind == TUNED else stored)
    if kind == TUNED:
        return _tuned(model, chosen, step)
    filled = [_filled(look, chosen, stored, count) for look in _seen(model, chosen, step)]
    looks, owners = [look for look, _ in filled], filled[0][1]
    used = {task: int((owners == t).sum()) for t, task in enumerate(model.tasks)}
    before, tried = _estimates(model, looks, owners, AUTO if kind == "auto" else (kind,), step)
    best = _simplest_good(tried) if tried else AUTO[0] if kind == "auto" else kind
    everything = torch.arange(len(owners))
    fitted = {
        f"{best}.{name}": tensor
        for look in (looks if find_router(best).second_look else looks[:1])
        for name, tensor in look.fit(best, everything, owners).items()
    }
    after = tried.get(best)
    advice = advise(used, before, after, model.shared_labels)
    return Calibration(best, used, before, after, tried, advice, empty), fitted | _moments(looks, owners, len(used))


def _refuse_without(
    model: Model, chosen: dict[str, list[Any]], stored: dict[str, dict[str, Tensor]]
) -> tuple[str, ...]:
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


def _filled(
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


def _moments(looks: list[Seen], owners: Tensor, tasks: int) -> dict[str, Tensor]:
    """What is kept of the inputs for the day when tasks are added or removed."""
    return moment_tensors({place_of(look.names): fit_moments(look.activations, owners, tasks) for look in looks})


def _simplest_good(tried: dict[str, Estimate]) -> str:
    """The first kind within a standard error of the best: a dozen inputs a task cannot tell small differences."""
    best = max((found.mean for found in tried.values()), key=lambda mean: mean.value)
    least = best.value - (best.high - best.low) / 4  # an interval of 95 % is four standard errors wide
    return next(kind for kind, found in tried.items() if found.mean.value >= least)


def _tuned(model: Model, chosen: dict[str, list[Any]], step: Step) -> tuple[Calibration, dict[str, Tensor]]:
    """The same for the router that is trained once: some inputs are left out, for the estimate."""
    trained, asked = leave_out(chosen)
    tuning = Tuning(model, TuneOptions())
    rows, _ = (read_rows(model.core, part, tuning.options.tokens) for part in (trained, asked))
    tuning.train(*rows, step)
    kept = tuning.kept()
    tried: dict[str, Estimate] = {}
    known = asked if any(asked.values()) else trained
    owners = torch.tensor([t for t, items in enumerate(known.values()) for _ in items])
    looks = list(_seen(model, known, step))
    before, _ = _estimates(model, looks, owners, (), step)
    if any(asked.values()):
        own = Seen(tuning.voters, _activations(model, tuning.first_pass, known, step), [])
        router = find_router(TUNED).load(own.names, kept, [])
        votes = own.votes(router, torch.arange(len(owners)))
        routings = model.stages.decide(votes, None, model.stages.choice(unknown=Unknown()))
        tried[TUNED] = estimate(model.tasks, owners, routings)
    used = {task: len(items) for task, items in trained.items()}
    advice = advise(used, before, tried.get(TUNED), model.shared_labels)
    done = Calibration(TUNED, used, before, tried.get(TUNED), tried, advice)
    fitted = {f"{TUNED}.{name}": tensor for name, tensor in kept.items()}
    return done, fitted | _moments(looks, owners, len(used))


def _seen(model: Model, chosen: dict[str, list[Any]], step: Step) -> Iterator[Seen]:
    """What each look sees of the inputs."""
    stages = model.stages
    for look in (stages.first, stages.second):
        if look is not None:
            folder = model.core.reader.folder
            subspaces = subspaces_of(look.voters, model.sets.tensors, stages.options, look.first_pass, folder)
            yield Seen(look.voters, _activations(model, look.first_pass, chosen, step), subspaces)


def _estimates(
    model: Model, looks: list[Seen], owners: Tensor, kinds: Iterable[str], step: Step
) -> tuple[Estimate, dict[str, Estimate]]:
    """The estimate without calibration, and that of each kind, on no more inputs than it takes."""
    rows = torch.cat([torch.where(owners == task)[0][:_ESTIMATED] for task in range(len(model.tasks))])
    some = [Seen(look.voters, [z[rows] for z in look.activations], look.subspaces) for look in looks]
    found: dict[str, Estimate] = {}
    for kind in ("projection", *kinds):
        own = some if find_router(kind).second_look else some[:1]
        routings = held_out_routings(model.stages, own, kind, owners[rows], step)
        if routings is not None:
            found[kind] = estimate(model.tasks, owners[rows], routings)
    return found.pop("projection"), found


def _write(path: Path, result: Path, kind: str, fitted: dict[str, Tensor]) -> None:
    """The bundle at `path` with the fitted router, in a folder of its own that shares all other files with it."""
    manifest = read_manifest(path)
    kept = {}
    if ROUTER in manifest["files"]:
        kept = {n: t for n, t in read_tensors(path / ROUTER) if not n.startswith((f"{kind}.", f"{MOMENTS}."))}
    link_tree(path, result, leave_out=(MANIFEST, ROUTER, *LEFT_OVER))
    write_tensors(result / ROUTER, {**kept, **fitted})
    entry = {"bytes": (result / ROUTER).stat().st_size, "sha256": file_sha256(result / ROUTER)}
    sign_manifest(result, {**manifest, "router_kind": kind, "files": {**manifest["files"], ROUTER: entry}})


def _activations(model: Model, first_pass: FirstPass, chosen: dict[str, list[Any]], step: Step) -> list[Tensor]:
    """What each voter of a pass sees of the inputs (n, width), in their order."""

    def stepping(task: str, items: list[Any]) -> Iterator[Any]:
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
