"""One fine-tuned version of the base, as a merge sees it: what it changes in each tensor, and its head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor
from transformers import PretrainedConfig

from massmerge.checkpoints.backbone import (
    Base,
    config_differences,
    infer_task_model,
    load_config,
    split,
)
from massmerge.checkpoints.differences import dispensable, inside, refuse_differences
from massmerge.checkpoints.expert_tensors import ExpertTensor, FullTensor, difference
from massmerge.checkpoints.open_clip import OpenClipStore
from massmerge.checkpoints.skeleton import Match, Reading, Skeleton, shape_of, untie_output
from massmerge.checkpoints.sources import Source
from massmerge.checkpoints.stores import Store
from massmerge.checkpoints.wrapped import PartStore, backbone_prefix
from massmerge.errors import InputError, listing
from massmerge.io.tensor_file import TensorInfo


@dataclass(frozen=True)
class HeadParts:
    """The tensors of a task's model that are not the backbone's, with the class that runs them."""

    skeleton: Skeleton
    store: Store
    readings: dict[str, Reading]

    def read(self, name: str) -> Tensor:
        """A tensor of the head, under its name in the task's model."""
        return self.readings[name].read(self.store, self.skeleton.config)


class Expert(Protocol):
    """What a merge asks of an expert, whatever it was stored as."""

    @property
    def source(self) -> Source:
        """Where it comes from."""
        ...

    @property
    def form(self) -> str:
        """What it was stored as: `full` or `adapter`."""
        ...

    @property
    def head(self) -> HeadParts | None:
        """Its head, if it carries one."""
        ...

    @property
    def warnings(self) -> list[str]:
        """What a person should know before it is merged."""
        ...

    def names(self) -> set[str]:
        """The base's tensors that the expert may change, and tensors that it adds to them."""
        ...

    def rank_limit(self, name: str) -> int | None:
        """The rank of the expert's delta if it is known beforehand; none for a full fine-tune."""
        ...

    def read(self, name: str) -> ExpertTensor:
        """The expert's tensor, or its delta as a product of two thin matrices."""
        ...

    def stored(self, name: str) -> TensorInfo | None:
        """Where its own value of a tensor lies in a file as it is, so that a part can be read; none elsewhere."""
        ...

    @property
    def at_hand(self) -> bool:
        """Whether its weights are on this machine; of a hub repository that was not downloaded only headers are known."""
        ...

    def changes(self, name: str, base: Base) -> bool:
        """Whether it changes a tensor that it may change, or adds it to the base.

        One look at the weights, before ranks are shared out: a full checkpoint holds the whole backbone, and fine-tuning
        often leaves its largest matrix, the word embedding, as it was. Ranks reserved for that would be a part of the
        budget that nobody uses.
        """
        ...

    def apart_bytes(self, base: int, stored: int) -> int:
        """Bytes of the expert by itself, without its head.

        Args:
            base: bytes of the base.
            stored: bytes of what a bundle stores of the expert.
        """
        ...


def differs(name: str, base: Base, theirs: Tensor) -> bool:
    """Whether an expert's tensor is another than the base's."""
    if name not in base.readings:
        return True
    ours = base.read(name)
    return not ours.equal(theirs) if ours.dtype == theirs.dtype else bool(difference(ours, theirs).any())


@dataclass(frozen=True)
class FullExpert:
    """A whole checkpoint."""

    source: Source
    skeleton: Skeleton
    store: Store
    readings: dict[str, Reading]
    head: HeadParts | None
    warnings: list[str] = field(default_factory=list)
    beside: Mapping[str, TensorInfo] = field(default_factory=dict)
    """What its file holds besides the model."""

    @property
    def form(self) -> str:
        """A checkpoint of its own."""
        return "full"

    def names(self) -> set[str]:
        """Every tensor of the backbone that the expert's class has."""
        return set(self.readings)

    def rank_limit(self, name: str) -> int | None:
        """Not known: a full fine-tune may change anything."""
        return None

    def read(self, name: str) -> FullTensor:
        """The fine-tuned tensor; names tied to it in the file must agree."""
        reading = self.readings[name]
        tensor = reading.read(self.store, self.skeleton.config)
        for other in reading.also:
            if not tensor.equal(self.store.read(other)):
                raise InputError(
                    f"{self.source.text}: {reading.keys[0]} and {other} are one tensor in a {self.skeleton.class_name} "
                    "but hold different values. Save the expert with tied weights."
                )
        return FullTensor(tensor)

    def stored(self, name: str) -> TensorInfo | None:
        """Where the fine-tuned tensor lies; none if names tied to it must be compared."""
        reading = self.readings[name]
        return None if reading.also else reading.stored(self.store)

    @property
    def at_hand(self) -> bool:
        """Whether the checkpoint was downloaded."""
        return self.source.at_hand

    def changes(self, name: str, base: Base) -> bool:
        """Whether a tensor differs; most do in their first bytes already, so little more is read than what does not."""
        return self._starts_differ(name, base) or differs(name, base, self.read(name).tensor)

    def _starts_differ(self, name: str, base: Base) -> bool:
        """Whether the first bytes differ of a tensor that both files store as it is."""
        one, other = base.readings.get(name), self.readings[name]
        if one is None or one.converter or other.converter or one.info.dtype != other.info.dtype:
            return False
        ours, theirs = base.store.start(one.keys[0]), self.store.start(other.keys[0])
        # Of a file in a store fewer bytes are read.
        return ours is not None and theirs is not None and any(a != b for a, b in zip(ours, theirs, strict=False))

    def apart_bytes(self, base: int, stored: int) -> int:
        """As many as the base's."""
        return base


@dataclass(frozen=True)
class TaskModel:
    """A task's model class, and what the expert's files give it."""

    skeleton: Skeleton
    store: Store
    match: Match
    beside: dict[str, TensorInfo]
    """What the files hold outside of the model, as in a class that somebody wrote around it."""


def task_model(source: Source, base: Base) -> TaskModel:
    """The task's model class and what the expert's files give it."""
    store = source.store()
    bare = source.is_file or source.file("config.json") is None
    beside: dict[str, TensorInfo] = {}
    if isinstance(store, OpenClipStore):
        store, bare = store.only(base.skeleton.canonical), True  # a config.json beside it is not one of transformers
    elif prefix := backbone_prefix(store.infos, base.skeleton):
        beside = {name: info for name, info in store.infos.items() if not name.startswith(prefix)}
        store = PartStore(store, prefix)
    config = None if bare else load_config(source)
    if config is None or not config.architectures:
        skeleton, match = infer_task_model(base.skeleton if config is None else shape_of(config), store.infos)
        return TaskModel(skeleton, store, match, beside)
    skeleton = untie_output(shape_of(config, config.architectures[0]), store.infos)
    return TaskModel(skeleton, store, skeleton.match(store.infos), beside)


def open_full_expert(source: Source, base: Base) -> FullExpert:
    """A full checkpoint as an expert of the base.

    Raises:
        InputError: it is not a version of the base; every tensor that differs is listed.
    """
    found = task_model(source, base)
    skeleton, store, match = found.skeleton, found.store, found.match
    parts = split(skeleton, base.skeleton)
    spare = dispensable(skeleton, match, parts)
    strange = inside(match.unexpected, skeleton, base)
    refuse_differences(skeleton, match, parts, base, spare, strange)
    readings = {parts.backbone[name]: r for name, r in match.readings.items() if name in parts.backbone}
    readings |= {ours: match.readings[name] for ours, name in parts.tied.items() if name in match.readings}
    head = {name: match.readings[name] for name in parts.head}
    beside = found.beside | {name: store.infos[name] for name in match.unexpected if name not in strange}
    differences = config_differences(_backbone_config(skeleton, base), base.skeleton.config)
    warnings = [f"its configuration differs from the base's:{listing(differences)}"] if differences else []
    own = [name for name in readings if name not in base.readings]
    if own:
        warnings.append(f"the base has no such tensor, so the expert's is kept whole:{listing(own)}")
    if spare:
        warnings.append(f"its file lacks these, so the base's are used:{listing(spare)}")
    cut = HeadParts(skeleton, store, head) if head else None
    return FullExpert(source, skeleton, store, readings, cut, warnings, beside)


def _backbone_config(skeleton: Skeleton, base: Base) -> PretrainedConfig:
    path = skeleton.submodule(type(base.skeleton.model))
    return skeleton.model.get_submodule(path.rstrip(".")).config if path else skeleton.config
