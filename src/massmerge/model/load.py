"""How a bundle is loaded: base, heads, looks and second pass are made of its files and put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from massmerge.bundle.damage import DamageWatch
from massmerge.bundle.factors import TaskTensors
from massmerge.bundle.reader import Bundle, opened_in_words
from massmerge.checkpoints.skeleton import Skeleton, Slot
from massmerge.errors import InputError
from massmerge.io.collector import collector_paused
from massmerge.io.placement import Placement, moved
from massmerge.model.base import load_base
from massmerge.model.core import Core, LabelledHead
from massmerge.model.heads.classify import Head, Shells, backbone_call, load_head
from massmerge.model.inputs import InputReader
from massmerge.model.model import Model
from massmerge.model.route.bases import SiteBases
from massmerge.model.route.first_pass import FirstPass, Voter
from massmerge.model.route.fixed import make_fixed
from massmerge.model.route.stages import Look, SecondLook, Stages
from massmerge.model.route.tuned import put_adapter
from massmerge.model.route.unused import drop_unused
from massmerge.model.route.voters import (
    choose_voters,
    fitted_tensors,
    load_typicality,
    make_router,
    not_fitted,
    subspaces_of,
)
from massmerge.model.routing_model import RoutingModel
from massmerge.model.second_pass import SecondPass
from massmerge.model.second_pass.cache import DenseCache
from massmerge.model.second_pass.first_token import first_token_layers
from massmerge.model.second_pass.install import PROBE_BATCH, Observed, observe
from massmerge.model.second_pass.sets import Sets
from massmerge.model.speed import plain
from massmerge.model.speed.packed import pack_alone, pack_layers
from massmerge.model.trees import shared_copy
from massmerge.routing import Site
from massmerge.routing.confidence import ConfidenceRule, data_free_rule
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.router import Router
from massmerge.routing.routers import find_router
from massmerge.routing.separation import separation
from massmerge.routing.sites import probe_inputs, watched_sites
from massmerge.routing.tuned import TUNED

_M = TypeVar("_M", bound=RoutingModel)


def load(
    path: str | Path,
    *,
    router: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    cache: str | int = 0,
    check: bool | Literal["background"] = "background",
    mapped: bool = True,
) -> Model:
    """Load a bundle.

    Args:
        path: the bundle's folder.
        router: `projection`, or one that `mass calibrate` has fitted; the bundle's own choice by default.
        device: where to run, such as `cpu`, `cuda:1` or `mps`; a GPU if there is one by default.
        dtype: `float32`, `bfloat16` or `float16`, of weights and activations; by default the base's own if the device is
            fast with it, else float32.
        cache: bytes (or `"512MB"`) for dense weights of sets that are used again and again; none by default.
        check: how files are compared with the manifest: in the `background`, which takes little time: small files now, the
            large ones by XXH128 before the first answer and by SHA-256 after it, and all calls fail as soon as damage is
            found; everything by SHA-256 now (True); or nothing.
        mapped: leave the tensors of base and tasks in their files, which costs less memory. Then every call fails if these
            files have changed, and a file that is cut short during a call ends the process (SIGBUS). False reads them.

    Raises:
        InputError: not a bundle, or damaged.
    """
    make = partial(_load, router=router, device=device, dtype=dtype, cache=cache, mapped=mapped)
    model = _watched(path, check, make, mapped=mapped)
    if model.stages.second and not mapped:
        _ = model.stages.second.router  # made now: nothing is read later
    return model


def load_routing(
    path: str | Path,
    *,
    router: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    check: bool | Literal["background"] = "background",
    mapped: bool = True,
) -> RoutingModel:
    """Load of a bundle only what names tasks: the base up to the last voting site, and the tasks' subspaces there.

    Args:
        path: as in `load`, like all others.
        router: which router.
        device: where to run.
        dtype: the type to run in.
        check: how files are compared with the manifest.
        mapped: leave the tensors of the base in their file; tasks' files are not needed any more.

    Raises:
        InputError: not a bundle, or damaged.
    """
    make = partial(_load_routing, router=router, device=device, dtype=dtype, mapped=mapped)
    return _watched(path, check, make, mapped=mapped)


def _watched(
    path: str | Path,
    check: bool | Literal["background"],
    make: Callable[[Bundle, DamageWatch | None], _M],
    *,
    mapped: bool,
) -> _M:
    """What is made of a bundle while its files are compared with the manifest."""
    if check not in (True, False, "background"):
        raise InputError(f"check is True, False or 'background', not {check!r}.")
    bundle = Bundle(path, check=False)
    watch = DamageWatch(bundle, first=check is True) if check else None
    try:
        with collector_paused(), opened_in_words(bundle.path):
            model = make(bundle, watch)
    except Exception:
        if watch:  # what went wrong with a damaged bundle is the damage, whatever error came of it
            watch.refuse_damage()
        raise
    if watch:
        watch.refuse_replaced()
        if not mapped:
            watch.refuse_damage(wait=True)
    return model


def _load(
    bundle: Bundle,
    watch: DamageWatch | None,
    *,
    router: str | None,
    device: str,
    dtype: str,
    cache: str | int,
    mapped: bool,
) -> Model:
    place = Placement.choose(device, dtype, getattr(torch, bundle.base_dtype))
    tensors = TaskTensors(bundle, place, mapped=mapped)
    touched = tensors.touched()
    base = _load_base(bundle, touched, place, check=watch is not None)
    if not mapped:
        _own_memory(base)
    pack_layers(base)
    slots = Skeleton(base).slots
    tensors.refuse_misfits(slots)
    shells: Shells = {}
    heads, further = _load_heads(bundle, base, shells), _load_further(bundle, base, shells)
    every = heads | {f"{task}/{name}": one.head for task, own in further.items() for name, one in own.items()}
    sites, observed = _probe(base, probe_inputs(base, PROBE_BATCH), every)
    # Before the looks, whose hooks would be copied with the base.
    first_only = set if plain() else partial(_first_only, base, observed, every)
    second = SecondPass(base, touched, slots, observed, first_only)
    stages = _stages(bundle, base, sites, router or bundle.router_kind, tensors, slots)
    core = replace(_make_core(bundle, base, place, heads, stages, watch if mapped else None), further=further)
    cached = DenseCache(0 if plain() else cache, second)
    return Model(core, stages, Sets(core, bundle.path, tensors, second, cached, slots, bundle.recipe.answer.merge))


def _load_routing(
    bundle: Bundle, watch: DamageWatch | None, *, router: str | None, device: str, dtype: str, mapped: bool
) -> RoutingModel:
    place = Placement.choose(device, dtype, getattr(torch, bundle.base_dtype))
    tensors = TaskTensors(bundle, place)  # mapped: of most of it nothing is read
    base = _load_base(bundle, tensors.touched(), place, check=watch is not None)
    pack_layers(base)
    slots = Skeleton(base).slots
    tensors.refuse_misfits(slots)
    sites, _ = _probe(base, probe_inputs(base, PROBE_BATCH), {})
    stages = _stages(bundle, base, sites, router or bundle.router_kind, tensors, slots)
    looks = [stages.first, stages.second] if stages.second else [stages.first]
    for look in looks:
        _ = look.router  # made now: tasks' files are not read later
    drop_unused(base, [look.first_pass for look in looks])
    if not mapped:
        for look in looks:  # mapped values lie in the file; of those in memory one copy is enough
            pack_alone(look.first_pass.model)
        _own_memory(base)
    return RoutingModel(_make_core(bundle, base, place, {}, stages, watch if mapped else None), stages)


def _load_base(bundle: Bundle, touched: set[str], place: Placement, *, check: bool) -> PreTrainedModel:
    """The base where it runs, of a kind that its configuration says it is."""
    base = load_base(bundle, touched, place, check=check)
    if (
        getattr(base.config, "is_encoder_decoder", False)
        and "decoder_input_ids" not in signature(base.forward).parameters
    ):
        raise InputError(f"{bundle.path}: its base is said to have a decoder, and a {type(base).__name__} has none.")
    return base


def _make_core(
    bundle: Bundle,
    base: PreTrainedModel,
    place: Placement,
    heads: dict[str, Head],
    stages: Stages,
    watch: DamageWatch | None,
) -> Core:
    """Base and heads with what reads inputs for them."""

    def attempt(inputs: dict[str, Tensor]) -> object:
        """A first pass, which shows whether the base takes such inputs."""
        return stages.first.first_pass(place.batch(inputs))

    seen = probe_inputs(base)[base.main_input_name].shape[1:]
    image = base.main_input_name == "pixel_values"
    reader = InputReader(bundle.processor_folder, base.config, image=image, attempt=attempt, seen=seen)
    labels = {task.name: task.labels for task in bundle.tasks if task.labels is not None}
    options, shared = bundle.recipe.answer, bundle.recipe.shared_labels
    return Core(base, stages.tasks, labels, heads, reader, shared, options, watch, stages.rule)


def _own_memory(base: PreTrainedModel) -> None:
    """Bring tensors that lie in a mapped file into memory."""
    for tensor in (*base.parameters(), *base.buffers()):
        tensor.data = tensor.data.clone()


def _load_heads(bundle: Bundle, base: PreTrainedModel, shells: Shells) -> dict[str, Head]:
    found = {task.name: load_head(bundle.head_folder(task.name), base, shells) for task in bundle.tasks}
    heads = {task: head for task, head in found.items() if head is not None}
    for task in bundle.tasks:
        head, labels = heads.get(task.name), len(task.labels or ())
        if head is not None and head.labels_expected != labels:
            raise InputError(
                f"{bundle.path}: {task.name} has {labels} labels, but its head has {head.labels_expected} outputs. "
                "Merge again."
            )
    return heads


def _load_further(bundle: Bundle, base: PreTrainedModel, shells: Shells) -> dict[str, dict[str, LabelledHead]]:
    """The further heads of tasks that have some."""
    found: dict[str, dict[str, LabelledHead]] = {}
    for task in bundle.tasks:
        for name, labels in task.heads.items():
            head = load_head(bundle.further_head(task.name, name), base, shells)
            if head is None or head.labels_expected != len(labels):
                raise InputError(f"{bundle.path}: {task.name}: head and labels of {name} do not fit. Merge again.")
            found.setdefault(task.name, {})[name] = LabelledHead(head, labels)
    return found


def _probe(base: PreTrainedModel, inputs: dict[str, Tensor], heads: dict[str, Head]) -> tuple[list[Site], Observed]:
    """The sites, and which modules can be divided by inputs: one forward pass shows both."""
    with watched_sites(base) as found:
        observed = observe(base, backbone_call(heads.values(), inputs, base))
    return found(), observed


def _first_only(base: PreTrainedModel, observed: Observed, heads: dict[str, Head]) -> set[str]:
    """Layers of which all heads read the first token's row alone."""
    inputs = probe_inputs(base, 1)
    tree = shared_copy(base)  # other threads may be running the base
    call = backbone_call(heads.values(), inputs, base)
    return first_token_layers(tree, observed.called, heads.values(), inputs, call)


def _make_first_pass(
    bundle: Bundle, base: PreTrainedModel, kind: str, voters: list[Voter], tensors: TaskTensors, slots: dict[str, Slot]
) -> FirstPass:
    if kind == TUNED:
        tree = shared_copy(base)
        put_adapter(tree, fitted_tensors(bundle, kind))
        pack_layers(tree)
        return FirstPass(tree, voters)
    if bundle.recipe.router.first_pass != "fixed":
        return FirstPass(base, voters)
    tree = shared_copy(base)
    first_pass = FirstPass(tree, voters)
    make_fixed(bundle, tensors, tree, first_pass, slots)
    pack_layers(tree)  # its weights are other ones than the base's
    return first_pass


def _stages(
    bundle: Bundle,
    base: PreTrainedModel,
    sites: list[Site],
    kind: str,
    tensors: TaskTensors,
    slots: dict[str, Slot],
) -> Stages:
    """The first look; and where images have one, the second, which the first half of the blocks leaves inputs to."""
    recipe, image = bundle.recipe, base.main_input_name == "pixel_values"
    bases = SiteBases(tensors)
    voters = choose_voters(recipe, sites, base, bases, half=image)
    first_pass = _make_first_pass(bundle, base, kind, voters, tensors, slots)
    subspaces = subspaces_of(voters, bases, recipe.router, first_pass, bundle.processor_folder)
    own = moved(make_router(bundle, kind, voters, subspaces), base.device)
    first = Look(first_pass, lambda: own)
    second = _second_look(bundle, base, sites, kind, tensors, subspaces) if image else None
    constants, chosen = bundle.confidence(kind), find_router(kind)
    rule = data_free_rule(images=image) if constants is None else ConfidenceRule.of(constants)
    if constants is None and chosen.probable:
        rule = rule.of_probabilities()
    targets = None if chosen.needs_fit and chosen.needs_names else tensors.targets
    # What is typical was learned from what the plain base sees.
    typical = None if kind == TUNED else moved(load_typicality(bundle, voters, subspaces), base.device)
    return Stages(tensors.names, sites, recipe.router, recipe.unknown, first, rule, second, typical, targets)


def _second_look(
    bundle: Bundle,
    base: PreTrainedModel,
    sites: list[Site],
    kind: str,
    tensors: TaskTensors,
    first: list[ProjectionRouter],
) -> SecondLook | None:
    """All sites vote where those of the first half, which the defaults choose for images, are not sure."""
    options = bundle.recipe.router
    if options.first_pass == "fixed" or options.site != "auto" or options.unsure <= 0:
        return None
    voters = choose_voters(bundle.recipe, sites, base, SiteBases(tensors), half=False)
    if not find_router(kind).second_look or not_fitted(bundle, kind, voters):
        return None

    first_pass = FirstPass(base, voters)

    def router() -> Router:
        """The router of the second look, made when it is first needed."""
        bases, folder = SiteBases(tensors), bundle.processor_folder
        own = subspaces_of(voters, bases, options, first_pass, folder, second=True)
        return moved(make_router(bundle, kind, voters, own), base.device)

    kin = separation([subspaces.bases for subspaces in dict.fromkeys(first)]).kin(tensors.targets)
    return SecondLook(first_pass, router, kin, options.unsure)
