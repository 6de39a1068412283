"""Puts the modules of the second pass into a tree over the base's tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from massmerge.checkpoints.backbone import language_class
from massmerge.checkpoints.skeleton import Slot, from_matrix
from massmerge.model.second_pass.modules import (
    PerSegment,
    SubspaceConv,
    SubspaceEmbedding,
    SubspaceLinear,
    SubspaceNorm,
    SubspacePatches,
)
from massmerge.model.second_pass.segments import Segments, running
from massmerge.model.second_pass.updates import SetChanges
from massmerge.model.speed import at_once, plain
from massmerge.model.speed.parallel import parts_of, run_parts
from massmerge.model.speed.patches import cuts_patches
from massmerge.model.trees import ShapesOnly, is_batched, join_rows, replace_module, shared_copy, take_rows

_FEW = 2  # batches after which it is worth a look what heads read
PROBE_BATCH = 3  # no other dimension of a model is likely to be 3 in first place


class Observed(NamedTuple):
    """What a forward pass shows of a model's modules, by path."""

    called: set[str]
    batched: set[str]
    """Those whose tensors all have the batch in first place."""
    spread: set[str]
    """Tables of positions that are read once for all inputs, and as well for each."""


class SecondPass:
    """The backbone with the update of the selected sets, for mixed batches.

    Layers that a task changes add their update segment by segment. A module with parameters of its own (a norm, a class
    token) has a copy for each set. Where a part of the network has no batch dimension to divide (relative positions
    computed once for all inputs), the smallest module around it that has one runs segment by segment.

    Args:
        base: the base; it is not changed, and its tensors are shared.
        touched: names of the tensors that at least one task changes.
        slots: kind and shape of every tensor.
        observed: what a forward pass of the base, or of its skeleton, has shown.
        find_first_only: finds the paths of linear layers of which heads read the first token's row alone. It takes as long
            as some answers do, so it is asked when there have been a few.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        touched: Iterable[str],
        slots: dict[str, Slot],
        observed: Observed,
        find_first_only: Callable[[], set[str]] = set,
    ) -> None:
        changed = set(touched)
        self._find_first_only, self._first_only = find_first_only, set[str]()
        self._answered = _FEW if at_once() else 0
        self._lock = threading.Lock()
        # Tied tensors are changed under each of their names.
        self._touched = {n: s for s in slots.values() if s.name in changed for n in (s.name, *s.aliases)}
        self._called, self._batched = observed.called, observed.batched | observed.spread
        self.model = shared_copy(base)
        owners = {name.rpartition(".")[0] for name in self._touched}
        whole = _outermost({self._unit(path) for path in owners if not self._is_layer(path, self._batched)})
        self.divided = not any(next(self._module(path).children(), None) for path in whole)
        """Whether all that runs segment by segment is a single module, which sees no key-value cache."""
        for path in sorted(owners):
            if not any(path == w or path.startswith(f"{w}.") or not w for w in whole):
                replace_module(self.model, path, self._layer(self.model.get_submodule(path), path))
        for path in whole:
            unit = PerSegment(self.model.get_submodule(path), partial(self._copy_for, path=path))
            if path:
                replace_module(self.model, path, unit)
            else:
                self.model = unit

    def __call__(self, inputs: dict[str, Any], segments: Segments) -> Any:
        """The backbone's output for a batch sorted by segments."""
        if segments.for_heads:
            self._count()

        @torch.inference_mode()
        def run(rows: slice) -> Any:
            """The output for some rows."""
            with running(segments.within(rows)):
                return self.model(**take_rows(inputs, rows, segments.batch))

        device = next(v.device for v in inputs.values() if isinstance(v, Tensor))
        return join_rows(run_parts(run, parts_of(segments.batch, device)))

    def _count(self) -> None:
        with self._lock:
            self._answered += 1
            if self._answered == _FEW + 1:
                self.look_for_first_only()

    def look_for_first_only(self) -> set[str]:
        """Find the layers of which heads read the first token alone; from now on they compute no more for heads."""
        self._first_only = self._find_first_only()
        for path, layer in self.layers().items():
            layer.first_only = path in self._first_only
        return self._first_only

    def of(self, changes: SetChanges) -> nn.Module:
        """The backbone for one set only, where its parts are wanted: each part is called by itself, inside `running`."""
        return self.model.of(changes) if isinstance(self.model, PerSegment) else self.model

    def layers(self) -> dict[str, SubspaceLinear]:
        """The linear layers that add an update, by path; those inside copies of a set are not among them."""
        return {path: m for path, m in self.model.named_modules() if isinstance(m, SubspaceLinear)}

    def _is_layer(self, path: str, where: set[str]) -> bool:
        """Whether the module at that path is a layer with an update of its own, called as one."""
        module = self._module(path)
        kinds = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm)
        if isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward:
            return False  # scales what it looks up (Gemma, BART), or takes no ids at all (BART's positions)
        return isinstance(module, kinds) and path in where and getattr(module, "groups", 1) == 1

    def _module(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)

    def _unit(self, path: str) -> str:
        """The smallest module around a path whose inputs and outputs have the batch dimension."""
        while path and path not in self._batched:
            path = path.rpartition(".")[0]
        return path

    def _copy_for(self, module: nn.Module, changes: SetChanges, path: str) -> nn.Module:
        """A module as one set has it: layers with their update, other parameters with the set's values."""
        copy = shared_copy(module)
        prefix = f"{path}." if path else ""
        inside = [name for name in sorted(self._touched) if name.startswith(prefix)]
        layers = {name.rpartition(".")[0] for name in inside if self._is_layer(name.rpartition(".")[0], self._called)}
        for name in inside:
            owner, _, own = name.rpartition(".")
            if owner not in layers:
                part = copy.get_submodule(owner.removeprefix(path).removeprefix("."))
                value = dense_value(changes, self._touched[name], getattr(part, own, None))
                if value is not None:
                    _assign(part, own, value)
        for layer in layers:
            inner = layer.removeprefix(prefix)
            replace_module(copy, inner, self._layer(copy.get_submodule(inner), layer))
        return copy

    def _layer(self, module: nn.Module, path: str) -> nn.Module:
        """The base's layer with updates, under the names that sets know its tensors by."""
        weight, bias = (self._touched[n].name if n in self._touched else n for n in (f"{path}.weight", f"{path}.bias"))
        if isinstance(module, nn.LayerNorm):
            return SubspaceNorm(module, weight, bias)
        if isinstance(module, nn.Embedding):
            return SubspaceEmbedding(module, weight)
        if isinstance(module, nn.Linear | Conv1D):
            return SubspaceLinear(
                module, weight, bias, transposed=isinstance(module, Conv1D), first_only=path in self._first_only
            )
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        return (SubspacePatches if cuts_patches(module) and not plain() else SubspaceConv)(module, weight, bias)


def observe(base: PreTrainedModel, probe: dict[str, Any]) -> Observed:
    """Watch a forward pass; `probe` are its keyword arguments, for a few inputs."""
    called: set[str] = set()
    unbatched: set[str] = set()
    spread: set[str] = set()
    decodes = language_class(base.config) is not None and not getattr(base.config, "is_encoder_decoder", False)
    batch = next(iter(probe.values())).shape[0]
    handles = []
    for path, module in base.named_modules():

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            """Note how a module is called."""
            called.add(path)
            tensors = {k: v for k, v in kwargs.items() if isinstance(v, Tensor)}
            if not is_batched(args, batch) or not is_batched(tensors, batch) or not is_batched(output, batch):
                unbatched.add(path)
                if decodes and isinstance(module, nn.Embedding) and args[0].ndim == 2 and args[0].shape[0] == 1:
                    spread.add(path)

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.inference_mode(), ShapesOnly():
            base(**probe)
    finally:
        for handle in handles:
            handle.remove()
    return Observed(called, (called - unbatched) | {""}, spread)


def _outermost(paths: set[str]) -> list[str]:
    """Paths that are not inside another of them."""
    return sorted(p for p in paths if not any(p != q and (not q or p.startswith(f"{q}.")) for q in paths))


def dense_value(changes: SetChanges, slot: Slot, base: Tensor | None) -> Tensor | None:
    """A tensor's value for a set, built densely; none where the set leaves the base's."""
    change = changes.change(slot.name)
    if change.update is None or base is None:
        return change.value
    return base + from_matrix(change.update.dense(), slot).to(base.dtype)


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[name] = value
