"""Fits the routers that need some unlabelled inputs a task, chooses among them, and keeps them in the bundle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massmerge.bundle.kept_inputs import kept_moments, moment_tensors
from massmerge.bundle.reader import Bundle
from massmerge.errors import InputError
from massmerge.model.advice import advise
from massmerge.model.estimate import Estimate, HeldOut, held_out, plain_choice, some_of
from massmerge.model.limits import Limits, by_rule, confidence_limit, fit_rule, typical_limit
from massmerge.model.load import load
from massmerge.model.model import Model
from massmerge.model.route.voters import TYPICAL
from massmerge.model.router_file import BundleSize, FittedRouter, replace_router
from massmerge.model.seen import Seen, Step, filled, look_at, refuse_without, see
from massmerge.model.tune import TuneOptions, Tuning, leave_out, read_rows
from massmerge.routing.confidence import ConfidenceRule, data_free_rule
from massmerge.routing.moments import fit_moments
from massmerge.routing.router import place_of
from massmerge.routing.routers import FITTED, find_router
from massmerge.routing.tuned import TUNED
from massmerge.routing.typicality import fit_typicality

MOST = 2000  # inputs of a task that are read unless more are asked for
AUTO = ("linear", "prototype")
KINDS = ("auto", *FITTED)


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
        rule: the constants of the router's confidence, where inputs were left out to fit them on.
        limits: what is proposed for `unknown:`.
        size: what the bundle weighs now.
    """

    kind: str
    inputs: dict[str, int]
    before: Estimate
    after: Estimate | None
    tried: dict[str, Estimate]
    advice: list[str]
    replayed: tuple[str, ...] = ()
    rule: ConfidenceRule | None = None
    limits: Limits = field(default_factory=Limits)
    size: BundleSize | None = None

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
            "confidence": None if self.rule is None else asdict(self.rule),
            "limits": self.limits.plain(),
            "size": None if self.size is None else asdict(self.size),
        }


def calibrate(
    path: str | Path,
    inputs: Mapping[str, Iterable[Any]],
    *,
    kind: str = "auto",
    count: int = MOST,
    precision: float | None = None,
    write_limits: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    progress: Step = lambda name: None,
) -> Calibration:
    """Fit a router on inputs of each task and make it the bundle's.

    Args:
        path: the bundle. It is replaced as a whole by one with the router; all other files stay what they are.
        inputs: for each task some inputs of it; they need no labels. A task may have none if an earlier calibration had:
            the bundle keeps their mean and scatter, also when tasks are added or removed.
        kind: `auto` takes `linear` unless `prototype` beats it by more than a standard error in cross-validation.
            `prototype` keeps the mean activation and counts it together with the subspaces; `linear` is a logistic
            regression on what all voters see, together with the prototypes; `nearest` keeps all activations; `mlp` trains a
            network on them; `tuned` trains an adapter of the first pass to name the task.
        count: how many inputs of each task are used at most.
        precision: propose the least confidence with which this share of answers is right.
        write_limits: write the limits that are proposed into the bundle, which abstains by them from then on.
        device: where to run, as in `load`.
        dtype: the type to run in, as in `load`; a router that is `tuned` is trained in float32.
        progress: called for each input that is read and each fold that is fitted.

    Returns:
        What was fitted, and the routing accuracy to expect, estimated by cross-validation.

    Raises:
        InputError: no router of that kind is fitted, a task is unknown or has no inputs, or one of them cannot be read.
        MassError: another command is writing the bundle, it has changed meanwhile, or the disk is full.
    """
    if kind not in KINDS:
        raise InputError(f"kind is one of {', '.join(KINDS)}, not {kind!r}.")
    if precision is not None and not 0 < precision < 1:
        raise InputError(f"precision is a share between 0 and 1, not {precision}.")

    def fit(opened: Path) -> tuple[Calibration, FittedRouter]:
        """The report, and the router that is stored."""
        done, tensors = _fit(_load(opened, kind, device, dtype), inputs, kind, count, precision, progress)
        return done, FittedRouter(done.kind, tensors, done.rule, done.limits.unknown() if write_limits else {})

    found, size = replace_router(path, fit)
    return replace(found, size=size)


def _load(path: Path, kind: str, device: str, dtype: str) -> Model:
    """The bundle without a fitted router; steps of a training are too small for other types than float32."""
    return load(path, router="projection", device=device, dtype="float32" if kind == TUNED else dtype, check=True)


def _fit(
    model: Model, inputs: Mapping[str, Iterable[Any]], kind: str, count: int, precision: float | None, step: Step
) -> tuple[Calibration, dict[str, Tensor]]:
    """What was found out, and the tensors of the router that was chosen."""
    model.core.positions(list(inputs) or None)
    chosen = {task: list(islice(inputs.get(task, ()), count)) for task in model.tasks}
    stored = {} if model.stages.options.first_pass == "fixed" else kept_moments(Bundle(model.sets.bundle, check=False))
    empty = refuse_without(model, chosen, {} if kind == TUNED else stored)
    if kind == TUNED:
        return _tuned(model, chosen, precision, step)
    whole = [filled(look, chosen, stored, count) for look in look_at(model, chosen, step)]
    looks, owners = [look for look, _ in whole], whole[0][1]
    used = {task: int((owners == t).sum()) for t, task in enumerate(model.tasks)}
    kinds = AUTO if kind == "auto" else (kind,)
    asked = held_out(model, looks, owners, kinds, step)
    before, tried = asked["projection"].estimate, {k: asked[k].estimate for k in kinds if k in asked}
    best = _first_good(tried) if tried else kinds[0]
    everything = torch.arange(len(owners))
    fitted = {
        f"{best}.{name}": tensor
        for look in (looks if find_router(best).second_look else looks[:1])
        for name, tensor in look.fit(best, everything, owners).items()
    }
    typical, left_out = _typicality(looks[0], owners, len(used))
    items = [item for task, n in used.items() for item in (chosen[task] or [None] * n)]
    rule, limits = _sureness(model, asked.get(best), items, precision)
    limits = replace(limits, typicality=typical_limit(left_out))
    after = tried.get(best)
    advice = advise(used, before, after, model.shared_labels)
    done = Calibration(best, used, before, after, tried, advice, empty, rule, limits)
    return done, fitted | typical | _moments(looks, owners, len(used))


def _typicality(look: Seen, owners: Tensor, tasks: int) -> tuple[dict[str, Tensor], Tensor]:
    """What tells typical inputs from others, by the names that it is kept under; and how typical left out ones are."""
    rows = some_of(owners, tasks)
    fitted, left_out = fit_typicality(
        look.names, [z[rows] for z in look.activations], owners[rows], tasks, look.subspaces
    )
    return {f"{TYPICAL}.{name}": tensor for name, tensor in fitted.items()}, left_out


def _sureness(
    model: Model, found: HeldOut | None, items: list[Any], precision: float | None
) -> tuple[ConfidenceRule | None, Limits]:
    """The rule of confidence that inputs speak for, and the limit for a wanted precision."""
    if found is None:
        return None, Limits(precision=precision)
    owners = found.owners.tolist()
    right = [model.tasks[t] == r.selected[0] for t, r in zip(owners, found.routings, strict=True)]
    rule = fit_rule(data_free_rule(images=model.takes_images), found.routings, right)
    if precision is None:
        return rule, Limits()
    routings = [by_rule(routing, rule) for routing in found.routings]
    limit, answered = confidence_limit(model, [items[i] for i in found.rows.tolist()], routings, owners, precision)
    return rule, Limits(confidence=limit, precision=precision, answered=answered)


def _moments(looks: list[Seen], owners: Tensor, tasks: int) -> dict[str, Tensor]:
    """What is kept of the inputs for the day when tasks are added or removed."""
    return moment_tensors({place_of(look.names): fit_moments(look.activations, owners, tasks) for look in looks})


def _first_good(tried: dict[str, Estimate]) -> str:
    """The first kind within a standard error of the best: a few inputs of each task cannot tell small differences."""
    best = max((found.mean for found in tried.values()), key=lambda mean: mean.value)
    least = best.value - (best.high - best.low) / 4  # an interval of 95 % is four standard errors wide
    return next(kind for kind, found in tried.items() if found.mean.value >= least)


def _tuned(
    model: Model, chosen: dict[str, list[Any]], precision: float | None, step: Step
) -> tuple[Calibration, dict[str, Tensor]]:
    """The same for the router that is trained once: some inputs are left out, for the estimate."""
    trained, asked = leave_out(chosen)
    tuning = Tuning(model, TuneOptions())
    rows, _ = (read_rows(model.core, part, tuning.options.tokens) for part in (trained, asked))
    tuning.train(*rows, step)
    kept = tuning.kept()
    tried: dict[str, Estimate] = {}
    known = asked if any(asked.values()) else trained
    owners = torch.tensor([t for t, items in enumerate(known.values()) for _ in items])
    looks = list(look_at(model, known, step))
    before = held_out(model, looks, owners, (), step)["projection"].estimate
    rule, limits = None, Limits(precision=precision)
    if any(asked.values()):
        own = Seen(tuning.voters, see(model, tuning.first_pass, known, step), [])
        router = find_router(TUNED).load(own.names, kept, [])
        votes = own.votes(router, torch.arange(len(owners)))
        everything = torch.arange(len(owners))
        found = HeldOut.of(model, owners, everything, model.stages.decide(votes, None, plain_choice(model.stages)))
        tried[TUNED] = found.estimate
        rule, limits = _sureness(model, found, [item for items in known.values() for item in items], precision)
    used = {task: len(items) for task, items in trained.items()}
    advice = advise(used, before, tried.get(TUNED), model.shared_labels)
    done = Calibration(TUNED, used, before, tried.get(TUNED), tried, advice, (), rule, limits)
    fitted = {f"{TUNED}.{name}": tensor for name, tensor in kept.items()}
    return done, fitted | _moments(looks, owners, len(used))
