"""Everything that a loaded bundle runs on: base, first pass, routers, factors, second pass, heads."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from massmerge.bundle.damage import DamageWatch
from massmerge.bundle.factors import TaskTensors
from massmerge.bundle.reader import Bundle
from massmerge.checkpoints.skeleton import Skeleton, Slot
from massmerge.errors import InputError, MassError
from massmerge.io.allocator import keep_buffers
from massmerge.model.base import load_base
from massmerge.model.heads.classify import Head, ShellHead, load_head
from massmerge.model.heads.language import LanguageModels
from massmerge.model.inputs import InputReader, Row
from massmerge.model.route.decide import CloserLook, Router
from massmerge.model.route.first_pass import FirstPass, Voter
from massmerge.model.route.fixed import make_fixed
from massmerge.model.route.voters import choose_voters, make_routers, not_fitted
from massmerge.model.second_pass import SecondPass, SetChanges
from massmerge.model.second_pass.cache import DenseCache
from massmerge.model.second_pass.first_token import first_token_layers
from massmerge.model.second_pass.install import PROBE_BATCH, Observed, observe
from massmerge.model.speed.packed import pack_layers
from massmerge.model.trees import shared_copy
from massmerge.recipe import MergeKind, Recipe
from massmerge.routing import Site
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.prototype import PrototypeRouter
from massmerge.routing.separation import separation
from massmerge.routing.sites import probe_inputs, watched_sites

_KNOWN_SETS = 256  # sets whose small cores and norms are kept at hand
_CANDIDATES = 4  # tasks that answer an unclear image


@dataclass
class Runtime:
    """The parts of a loaded bundle."""

    path: Path
    recipe: Recipe
    tasks: list[str]
    labels: dict[str, tuple[str, ...]]
    base: PreTrainedModel
    sites: list[Site]
    voters: list[Voter]
    first_pass: FirstPass
    routers: list[Router]
    second_pass: SecondPass
    heads: dict[str, Head]
    reader: InputReader
    cache: DenseCache
    make_changes: Callable[..., SetChanges]
    tensors: TaskTensors
    closer: CloserLook | None = None
    watch: DamageWatch | None = None
    _sets: OrderedDict[tuple[int, ...], SetChanges] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def top_k(self) -> int:
        """K: heads that were trained apart do not share a scale, so by default one task is chosen."""
        return 1 if self.recipe.router.top_k == "auto" else int(self.recipe.router.top_k)

    @property
    def candidates(self) -> int:
        """How many tasks answer an unclear input; sets of several tasks have several heads anyway."""
        wanted = self.recipe.router.candidates
        if self.top_k > 1:
            return 1
        return (_CANDIDATES if self.closer else 1) if wanted == "auto" else wanted

    @cached_property
    def language_models(self) -> LanguageModels:
        """The language model of each set, for bases that generate."""
        return LanguageModels(self.base, self.second_pass, self.path, self.tasks)

    def batch(self, rows: list[Row], *, left: bool = False) -> dict[str, Tensor]:
        """Rows as one batch, where the backbone is; padded on the left if that is wanted."""
        self.refuse_damage()
        return {name: tensor.to(self.base.device) for name, tensor in self.reader.batch(rows, left=left).items()}

    def refuse_damage(self) -> None:
        """Raise an error if the files that the tensors lie in are damaged, or have changed."""
        if self.watch is not None:
            self.watch.refuse_damage()

    def with_options(
        self, *, router: Mapping[str, Any] | None = None, answer: Mapping[str, Any] | None = None
    ) -> Runtime:
        """The same bundle as if its recipe said so, for options that are read with every answer.

        Args:
            router: how many tasks are selected (`threshold`, `top_k`).
            answer: how a set is merged (`merge`) and heads are compared (`score`, `weight`).
        """
        options = self.recipe.router.model_copy(update=dict(router or {}))
        answers = self.recipe.answer.model_copy(update=dict(answer or {}))
        other = replace(self, recipe=self.recipe.model_copy(update={"router": options, "answer": answers}))
        if answers.merge == self.recipe.answer.merge:
            return other
        make_changes = partial(self.make_changes, variant=answers.merge)
        return replace(other, make_changes=make_changes, _sets=OrderedDict(), _lock=threading.Lock())

    def changes(self, tasks: tuple[int, ...]) -> SetChanges:
        """The changes of a set, made once."""
        with self._lock:
            if tasks not in self._sets:
                self._sets[tasks] = self.make_changes(tasks)
                if len(self._sets) > _KNOWN_SETS:
                    self._sets.popitem(last=False)
            self._sets.move_to_end(tasks)
            return self._sets[tasks]


def load_runtime(
    path: Path,
    *,
    router: str | None = None,
    device: str = "auto",
    cache: str | int = 0,
    check: bool | Literal["background"] = "background",
    mapped: bool = True,
) -> Runtime:
    """Load everything of a bundle that answers need; `check` and `mapped` as in `massmerge.load`."""
    if check not in (True, False, "background"):
        raise InputError(f"check is True, False or 'background', not {check!r}.")
    bundle = Bundle(path, check=False)
    watch = DamageWatch(bundle, first=check is True) if check else None
    try:
        with _collector_paused(), _in_words(bundle):
            runtime = _load(bundle, router, device, cache, check=bool(check), mapped=mapped)
    except Exception:
        if watch:  # what went wrong with a damaged bundle is the damage, whatever error came of it
            watch.refuse_damage()
        raise
    keep_buffers()
    if watch:
        watch.refuse_replaced()
        if mapped:
            runtime.watch = watch
        else:
            watch.refuse_damage(wait=True)
    if runtime.closer and not mapped:
        _ = runtime.closer.routers  # made now: nothing is read later
    return runtime


@contextmanager
def _in_words(bundle: Bundle) -> Iterator[None]:
    """A bundle whose parts do not go together can fail anywhere; who loads it is told that it is the bundle."""
    try:
        yield
    except (MassError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(
            f"{bundle.path}: its parts do not go together ({reason}). Merge again, or copy the bundle again."
        ) from error


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Loading makes thousands of objects that stay; to look through all of them for garbage takes longer than the rest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _load(bundle: Bundle, router: str | None, device: str, cache: str | int, *, check: bool, mapped: bool) -> Runtime:
    place = _device(device)
    tensors = TaskTensors(bundle, mapped=mapped)
    touched = tensors.touched()
    base = load_base(bundle, touched, check=check).to(place)
    if not mapped:
        _own_memory(base)
    pack_layers(base)
    if (
        getattr(base.config, "is_encoder_decoder", False)
        and "decoder_input_ids" not in signature(base.forward).parameters
    ):
        raise InputError(f"{bundle.path}: its base is said to have a decoder, and a {type(base).__name__} has none.")
    slots = Skeleton(base).slots
    tensors.refuse_misfits(slots)
    heads = _load_heads(bundle, base)
    probe = probe_inputs(base, PROBE_BATCH)
    sites, observed = _probe(base, probe, heads)
    kind = router or bundle.router_kind
    image = base.main_input_name == "pixel_values"
    voters = choose_voters(bundle.recipe, sites, base, tensors, half=image)
    routers = make_routers(bundle, kind, voters, tensors)  # small, and kept on the CPU
    tensors.to(place)
    second = SecondPass(base, touched, slots, observed, partial(_first_only, base, observed, heads))
    first_pass = _make_first_pass(bundle, base, voters, tensors, slots)

    def attempt(inputs: dict[str, Tensor]) -> object:
        return first_pass({k: v.to(place) for k, v in inputs.items()})

    reader = InputReader(
        bundle.processor_folder, base.config, image=image, attempt=attempt, seen=probe[base.main_input_name].shape[1:]
    )
    return Runtime(
        bundle.path,
        bundle.recipe,
        tensors.names,
        {task.name: task.labels for task in bundle.tasks if task.labels is not None},
        base,
        sites,
        voters,
        first_pass,
        routers,
        second,
        heads,
        reader,
        DenseCache(cache, second),
        _changes_maker(base, tensors, slots, bundle.recipe.answer.merge),
        tensors,
        _closer_look(bundle, base, sites, kind, tensors, routers) if image else None,
    )


def _own_memory(base: PreTrainedModel) -> None:
    """Bring tensors that lie in a mapped file into memory."""
    for tensor in (*base.parameters(), *base.buffers()):
        tensor.data = tensor.data.clone()


def _load_heads(bundle: Bundle, base: PreTrainedModel) -> dict[str, Head]:
    found = {task.name: load_head(bundle.head_folder(task.name), base) for task in bundle.tasks}
    heads = {task: head for task, head in found.items() if head is not None}
    for task in bundle.tasks:
        head, labels = heads.get(task.name), len(task.labels or ())
        if head is not None and head.labels_expected != labels:
            raise InputError(
                f"{bundle.path}: {task.name} has {labels} labels, but its head has {head.labels_expected} outputs. "
                "Merge again."
            )
    return heads


def _probe(base: PreTrainedModel, inputs: dict[str, Tensor], heads: dict[str, Head]) -> tuple[list[Site], Observed]:
    """The sites, and which modules can be divided by inputs: one forward pass shows both."""
    with watched_sites(base) as found:
        observed = observe(base, _call(base, inputs, heads))
    return found(), observed


def _first_only(base: PreTrainedModel, observed: Observed, heads: dict[str, Head]) -> set[str]:
    """Layers of which all heads read the first token's row alone."""
    inputs = probe_inputs(base, 1)
    tree = shared_copy(base)  # other threads may be running the base
    return first_token_layers(tree, observed.called, heads.values(), inputs, _call(base, inputs, heads))


def _call(base: PreTrainedModel, inputs: dict[str, Tensor], heads: dict[str, Head]) -> dict[str, Any]:
    """How the backbone is called with these inputs."""
    shell = next((h for h in heads.values() if isinstance(h, ShellHead)), None)
    return shell.backbone_call(inputs, base) if shell else with_decoder_start(inputs, base)


def _make_first_pass(
    bundle: Bundle, base: PreTrainedModel, voters: list[Voter], tensors: TaskTensors, slots: dict[str, Slot]
) -> FirstPass:
    if bundle.recipe.router.first_pass != "fixed":
        return FirstPass(base, voters)
    tree = shared_copy(base)
    first_pass = FirstPass(tree, voters)
    make_fixed(bundle, tensors, tree, first_pass, slots)
    pack_layers(tree)  # its weights are other ones than the base's
    return first_pass


def _changes_maker(
    base: PreTrainedModel, tensors: TaskTensors, slots: dict[str, Slot], merge: MergeKind
) -> Callable[..., SetChanges]:
    state = dict(base.state_dict())

    def make_changes(
        tasks: tuple[int, ...], weights: list[float] | None = None, variant: MergeKind = merge
    ) -> SetChanges:
        return SetChanges(tasks, tensors.factors, tensors.whole, state.get, variant, weights, slots)

    return make_changes


def _closer_look(
    bundle: Bundle, base: PreTrainedModel, sites: list[Site], kind: str, tensors: TaskTensors, first: list[Router]
) -> CloserLook | None:
    """All sites vote where those of the first half, which the defaults choose for images, are not sure."""
    options = bundle.recipe.router
    if options.first_pass == "fixed" or options.site != "auto" or options.unsure <= 0:
        return None
    voters = choose_voters(bundle.recipe, sites, base, tensors, half=False)
    if kind != "projection" and (kind != "prototype" or not_fitted(bundle, kind, voters)):
        return None
    subspaces = dict.fromkeys(r.residuals if isinstance(r, PrototypeRouter) else r for r in first)
    kin = separation([router.bases for router in subspaces if isinstance(router, ProjectionRouter)]).kin()
    return CloserLook(FirstPass(base, voters), lambda: make_routers(bundle, kind, voters, tensors), kin, options.unsure)


def _device(name: str) -> torch.device:
    """Where to run: as told, or a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"cannot run on {name!r} ({str(error).splitlines()[0]}). Use cpu, or cuda with a GPU."
        ) from None


def with_decoder_start(inputs: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Tensor]:
    """The inputs of a forward pass; the decoder of an encoder-decoder wants a prompt of its own, its first token."""
    if not getattr(base.config, "is_encoder_decoder", False):
        return inputs
    start = getattr(base.config, "decoder_start_token_id", None) or 0
    return {**inputs, "decoder_input_ids": torch.full_like(inputs["input_ids"][:, :1], start)}
