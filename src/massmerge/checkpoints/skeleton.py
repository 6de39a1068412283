"""The shape of a model without its weights: names, kinds and shapes of its tensors, and how a checkpoint file fills them.

A skeleton is the real model class built on the meta device, so the class itself says which tensors are the backbone's,
which are tied, and which names older versions of the library used. Two checkpoints are compared under module names only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.pytorch_utils import Conv1D

from massmerge.checkpoints.pretrained import empty_model, model_class
from massmerge.checkpoints.stores import SafetensorsStore, Store
from massmerge.io.tensor_file import TensorInfo

# Buffers that earlier versions of transformers stored; later ones make them at run time, some under other names.
_OLD_BUFFERS = (".position_ids", ".token_type_ids", ".attn.masked_bias", ".rotary_emb.inv_freq")

_SHAPES_KEPT = 16  # the classes that one kind of adapter may be of, with and without the labels that it has

Kind = Literal["linear", "conv1d", "conv", "embedding", "other"]


@dataclass(frozen=True)
class Slot:
    """A tensor that a model has: its canonical name, the names tied to it, its shape, and what it does."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    aliases: tuple[str, ...] = ()
    buffer: bool = False

    @property
    def matrix(self) -> tuple[int, int] | None:
        """Rows and columns of the matrix that is factored; none for a tensor that is stored whole."""
        if self.kind == "other":
            return None
        if self.kind == "conv1d":
            return self.shape[1], self.shape[0]
        return self.shape[0], int(torch.Size(self.shape[1:]).numel())


def to_matrix(tensor: Tensor, kind: Kind) -> Tensor:
    """A weight as the matrix (out, in) that acts on activations; GPT-2's Conv1D stores it transposed."""
    return tensor.mT.contiguous() if kind == "conv1d" else tensor.flatten(1)


def from_matrix(matrix: Tensor, slot: Slot) -> Tensor:
    """The inverse of `to_matrix`, in the shape of the slot."""
    return matrix.mT.contiguous() if slot.kind == "conv1d" else matrix.reshape(slot.shape)


@dataclass(frozen=True)
class Reading:
    """How one tensor of a model is read from a checkpoint file: a name, or several that a converter puts together."""

    keys: tuple[str, ...]
    info: TensorInfo
    target: str = ""
    converter: WeightConverter | None = None
    patterns: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    """Names in the file that are tied to this tensor and must hold the same values."""

    def read(self, store: Store, config: PretrainedConfig) -> Tensor:
        """The tensor under its module name."""
        if self.converter is None:
            return store.read(self.keys[0])
        return _convert(self, [store.read(key) for key in self.keys], config)[self.target]

    def stored(self, store: Store) -> TensorInfo | None:
        """Where the tensor lies in its file as it is; none if it is put together, in another kind of file, or in a store."""
        plain = self.converter is None and isinstance(store, SafetensorsStore)
        return self.info if plain and isinstance(self.info.path, Path) else None


@dataclass(frozen=True)
class Match:
    """What a checkpoint file gives a model, and where the two differ."""

    readings: dict[str, Reading]
    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Module name: shape in the file, shape in the model."""


class Skeleton:
    """A model class built on the meta device."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config: PretrainedConfig = model.config
        self._renamed: dict[frozenset[str], dict[str, tuple[str, str | None]]] = {}

    @property
    def class_name(self) -> str:
        """Name of the model class."""
        return type(self.model).__name__

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """Every tensor that a checkpoint of this model holds, by canonical name, tied names once."""
        kinds = _kinds(self.model)
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        names: dict[int, list[str]] = {}
        state = self.model.state_dict(keep_vars=True)
        for name, tensor in state.items():
            names.setdefault(id(tensor), []).append(name)
        slots = {}
        for group in names.values():
            kind: Kind = next((kinds[n] for n in group if n in kinds), "other")
            shape = tuple(state[group[0]].shape)
            slots[group[0]] = Slot(group[0], shape, kind, tuple(group[1:]), group[0] in buffers)
        return slots

    @cached_property
    def canonical(self) -> dict[str, str]:
        """Every name, tied ones included, to its canonical name."""
        return {name: slot.name for slot in self.slots.values() for name in (slot.name, *slot.aliases)}

    def rename(self, keys: Iterable[str]) -> Mapping[str, tuple[str, str | None]]:
        """File names to module names, with the pattern of the converter that takes them, if any."""
        names = frozenset(keys)
        if names not in self._renamed:  # files of one kind have the same names
            self._renamed[names] = self._rename(names)
        return self._renamed[names]

    def _rename(self, keys: Iterable[str]) -> dict[str, tuple[str, str | None]]:
        mapping = get_model_conversion_mapping(self.model)
        renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
        converters = [m for m in mapping if isinstance(m, WeightConverter)]
        prefix, state = self.model.base_model_prefix, self.canonical
        renamed = {}
        for key in sorted(keys, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if target not in state and key in state:
                target, pattern = key, None
            renamed[key] = (target, pattern)
        return renamed

    def match(self, infos: Mapping[str, TensorInfo]) -> Match:
        """Which tensor of a file fills which slot, from names and shapes alone."""
        readings: dict[str, Reading] = {}
        unexpected: list[str] = []
        grouped: dict[str, list[tuple[str, str]]] = {}
        for key, (target, pattern) in self.rename(infos).items():
            if pattern is not None and target in self.canonical:
                grouped.setdefault(target, []).append((key, pattern))
            elif target not in self.canonical:
                unexpected.append(key)
            elif (name := self.canonical[target]) not in readings:
                readings[name] = Reading((key,), infos[key])
            else:
                first = readings[name]
                readings[name] = Reading(first.keys, first.info, also=(*first.also, key))
        for target, members in grouped.items():
            readings.update(self._converted(target, members, infos))
        mismatched = {
            name: (reading.info.shape, self.slots[name].shape)
            for name, reading in readings.items()
            if reading.info.shape != self.slots[name].shape
        }
        missing = [name for name in self.slots if name not in readings]
        return Match(readings, missing, [k for k in unexpected if not self._is_transient(k)], mismatched)

    def _converted(
        self, target: str, members: list[tuple[str, str]], infos: Mapping[str, TensorInfo]
    ) -> dict[str, Reading]:
        """Readings of tensors that are split from, or joined of, tensors in the file; shapes by a run on meta."""
        pattern_to_converter = {
            p: c
            for c in get_model_conversion_mapping(self.model)
            if isinstance(c, WeightConverter)
            for p in c.source_patterns
        }
        keys, patterns = tuple(k for k, _ in members), tuple(p for _, p in members)
        first = infos[keys[0]]
        draft = Reading(keys, first, target, pattern_to_converter[patterns[0]], patterns)
        empty = [torch.empty(infos[k].shape, dtype=infos[k].dtype, device="meta") for k in keys]
        return {
            self.canonical[name]: Reading(keys, TensorInfo(tuple(t.shape), t.dtype), name, draft.converter, patterns)
            for name, t in _convert(draft, empty, self.config).items()
            if name in self.canonical
        }

    def _is_transient(self, key: str) -> bool:
        """Whether this name in a file means nothing: a buffer made at run time, or one that the class says to ignore."""
        patterns = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or []
        buffers = {name for name, _ in self.model.named_buffers()}
        target = self.rename([key])[key][0]
        return key.endswith(_OLD_BUFFERS) or target in buffers or any(re.search(p, key) for p in patterns)

    def submodule(self, kind: type[nn.Module]) -> str | None:
        """Path of the first part of this model that is of exactly that class, with a final dot; "" for itself."""
        for name, module in self.model.named_modules():
            if type(module) is kind:
                return f"{name}." if name else ""
        return None


_SHAPES: dict[tuple[object, ...], Skeleton] = {}


def untie_output(skeleton: Skeleton, infos: Mapping[str, TensorInfo]) -> Skeleton:
    """The skeleton with an output layer of its own, where a file holds one beside the embeddings it would be tied to.

    `from_pretrained` decides so too: T5 version 1.1 and FLAN-T5 have such a layer, though their class ties the two.
    """
    path, slot = _tied_output(skeleton)
    if slot is None:
        return skeleton
    held = {target: infos[key] for key, (target, _) in skeleton.rename(infos).items()}
    own = held.pop(f"{path}.weight", None)
    rest = [held[name] for name in (slot.name, *slot.aliases) if name in held]
    # A pickle of tied weights names the same bytes twice.
    if own is None or not rest or any(own.shares_bytes(other) for other in rest):
        return skeleton
    return with_own_output(skeleton)


def with_own_output(skeleton: Skeleton) -> Skeleton:
    """The skeleton with an output layer that is not tied to its embeddings."""
    if _tied_output(skeleton)[1] is None:
        return skeleton
    model = deepcopy(skeleton.model)  # others may look at this one too
    output = model.get_output_embeddings()
    output.weight = nn.Parameter(torch.empty_like(output.weight))
    return Skeleton(model)


def _tied_output(skeleton: Skeleton) -> tuple[str | None, Slot | None]:
    """Path and tensor of the output layer, if it is tied to the embeddings."""
    output = skeleton.model.get_output_embeddings()
    path = next((p for p, module in skeleton.model.named_modules() if module is output), None)
    slot = skeleton.slots.get(skeleton.canonical.get(f"{path}.weight", ""))
    return (path, slot) if output is not None and slot is not None and slot.aliases else (None, None)


def _convert(reading: Reading, tensors: list[Tensor], config: PretrainedConfig) -> dict[str, Tensor]:
    converter = deepcopy(reading.converter)
    assert converter is not None
    for key, pattern, tensor in zip(reading.keys, reading.patterns, tensors, strict=True):
        converter.add_tensor(reading.target, key, pattern, tensor)
    converted: dict[str, Any] = converter.convert(reading.target, config=config)
    return {name: t[0] if isinstance(t, list) else t for name, t in converted.items()}


def _kinds(model: nn.Module) -> dict[str, Kind]:
    """Which parameters are matrices that act on activations, by the module that owns them."""
    kinds: dict[str, Kind] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.Linear):
            kinds[f"{prefix}weight"] = "linear"
        elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            kinds[f"{prefix}in_proj_weight"] = "linear"
        elif isinstance(module, Conv1D):
            kinds[f"{prefix}weight"] = "conv1d"
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            kinds[f"{prefix}weight"] = "conv"
        elif isinstance(module, nn.Embedding):
            kinds[f"{prefix}weight"] = "embedding"
    return kinds


def shape_of(config: PretrainedConfig, class_name: str | None = None) -> Skeleton:
    """As `build`, for those who only look: a hundred adapters of one base share the skeletons of the classes they may be of.

    Raises:
        InputError: as `build` does.
    """
    # Some fields stand in the JSON as they were when the configuration was made, so the label count is named by itself.
    key = (class_name, type(config), config.num_labels, config.to_json_string(use_diff=False))
    found = _SHAPES.pop(key, None) or build(config, class_name)
    _SHAPES[key] = found  # the one used last stands at the end
    while len(_SHAPES) > _SHAPES_KEPT:
        _SHAPES.pop(next(iter(_SHAPES)))
    return found


def build(config: PretrainedConfig, class_name: str | None = None) -> Skeleton:
    """The skeleton of a model class; of the plain backbone (`AutoModel`) if no class is named.

    Raises:
        InputError: transformers has no such class, or cannot build it from this configuration.
    """
    model = empty_model(deepcopy(config), AutoModel if class_name is None else model_class(class_name))
    model.tie_weights()
    return Skeleton(model)
