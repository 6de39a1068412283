"""The base, and how a task's model is split into backbone and head by the model class itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from massmerge.checkpoints.open_clip import CONFIG as OPEN_CLIP_CONFIG
from massmerge.checkpoints.open_clip import OpenClipStore, open_clip_config
from massmerge.checkpoints.pretrained import pretrained_config
from massmerge.checkpoints.skeleton import (
    Match,
    Reading,
    Skeleton,
    Slot,
    build,
    shape_of,
    untie_output,
    with_own_output,
)
from massmerge.checkpoints.sources import Source
from massmerge.checkpoints.stores import SafetensorsStore, Store
from massmerge.errors import InputError, listing
from massmerge.io.tensor_file import TensorInfo
from massmerge.io.untrusted import GENERATION_CONFIG, refuse_code

# Fields of a configuration that may differ between base and expert without changing what the weights compute.
HARMLESS = {
    "architectures", "dtype", "torch_dtype", "id2label", "label2id", "num_labels", "problem_type", "transformers_version",
    "_name_or_path", "_commit_hash", "finetuning_task", "use_cache", "classifier_dropout", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "attention_dropout", "dropout", "seq_classif_dropout", "classifier_activation",
    "classifier_bias", "classifier_pooling", "initializer_factor", "initializer_range", "pad_token_id", "bos_token_id",
    "eos_token_id", "return_dict", "output_attentions", "output_hidden_states", "tie_word_embeddings", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "embd_pdrop",
    "attn_pdrop", "resid_pdrop", "dropout_rate", "mlp_dropout", "embedding_dropout", "drop_path_rate",
    "task_specific_params", "_attn_implementation_autoset", "sparse_prediction", "sparse_pred_ignore_index",
    "projection_dim",
}  # fmt: skip
# Classes tried for weights that come without a configuration of their own.
_TASK_CLASSES = (
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)


BACKBONE = "AutoModel"


@dataclass(frozen=True)
class Base:
    """The pretrained backbone: its skeleton, and where each of its tensors is read."""

    source: Source
    skeleton: Skeleton
    store: Store
    readings: dict[str, Reading]
    output: tuple[str, ...] = ()
    """Tensors of an output layer of its own, where the base is opened as the class that generates text."""

    def read(self, name: str) -> Tensor:
        """A tensor under its module name."""
        return self.readings[name].read(self.store, self.skeleton.config)

    def mapped(self, name: str) -> Tensor:
        """The same tensor, in its file where it lies there as it is: it takes no memory before it is used."""
        if self.stored(name) is not None and isinstance(self.store, SafetensorsStore):
            return self.store.mapped(self.readings[name].keys[0])
        return self.read(name)

    def stored(self, name: str) -> TensorInfo | None:
        """Where a tensor lies in its file as it is; none where it must be read as a whole."""
        return self.readings[name].stored(self.store) if name in self.readings else None

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor."""
        return self.readings[name].info

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of its numbers: of the first tensor, where there are several."""
        kinds = [reading.info.dtype for reading in self.readings.values()]
        return next((kind for kind in kinds if kind.is_floating_point), kinds[0])

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """The tensors that the base really has."""
        return {name: slot for name, slot in self.skeleton.slots.items() if name in self.readings}

    @property
    def writes(self) -> bool:
        """Whether it is opened as the class that generates text, output layer included."""
        return self.skeleton.class_name == language_class(self.skeleton.config)


@dataclass(frozen=True)
class Split:
    """A task's model divided: names in the task's model to names in the backbone, and the names of the head."""

    backbone: dict[str, str]
    head: tuple[str, ...]
    extra: tuple[str, ...]
    """Tensors inside the backbone that the base's class does not have: an expert with more layers, say."""
    tied: dict[str, str]
    """Names in the base of tensors that are one with another in the task's model, to that model's name of them."""


def language_class(config: PretrainedConfig) -> str | None:
    """The class that generates text with such a backbone; none for encoders and for what reads no text."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        names = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    # Encoders such as BERT have a class that generates too, for those trained as decoders.
    elif kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        return None
    else:
        names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = names.get(kind)
    return name if isinstance(name, str) else None


def auto_class(class_name: str) -> str:
    """The class of transformers that opens a checkpoint of this model class: one that generates, or the plain backbone."""
    named = {
        "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    return next((auto for auto, classes in named.items() if class_name in classes.values()), BACKBONE)


def load_config(source: Source) -> PretrainedConfig:
    """The configuration of a Hugging Face folder."""
    path = source.file("config.json")
    if path is None:
        raise InputError(f"{source.text}: has no config.json, so it is not a Hugging Face model folder.")
    refuse_code(path.parent, (GENERATION_CONFIG,))  # which a bundle takes along
    return pretrained_config(path.parent)


def open_base(source: Source) -> Base:
    """The base with all of what `AutoModel` would load; a head that it carries is left behind."""
    store = source.store() if source.is_file or source.file("config.json") is None else None
    if isinstance(store, OpenClipStore):
        skeleton = build(open_clip_config(store, source.json(OPEN_CLIP_CONFIG)))
    elif source.is_file:
        raise InputError(
            f"{source.text}: a base must be a Hugging Face folder or hub id; a lone file has no config.json."
        )
    else:
        skeleton, store = build(load_config(source)), source.store()
    match = skeleton.match(store.infos)
    if not match.readings:
        raise InputError(f"{source.text}: its weights are not those of a {skeleton.class_name}.")
    if match.mismatched:
        raise InputError(f"{source.text}: weights and config.json do not agree:{shape_listing(match.mismatched)}")
    # Behind the blocks a tensor may be missing: a masked language model has no pooler.
    absent = [name for name in match.missing if in_block(name)]
    if absent:
        raise InputError(
            f"{source.text}: a {skeleton.class_name} has tensors that its weights lack:{listing(absent, 200)}"
        )
    return Base(source, skeleton, store, match.readings)


def with_output(base: Base, *, own: bool) -> Base:
    """A base that generates, as the class that writes: with the layer that turns features into words.

    Args:
        base: the backbone alone.
        own: whether an expert has an output layer of its own, so that the base's must not stay tied to its embeddings.
    """
    skeleton = untie_output(build(base.skeleton.config, language_class(base.skeleton.config)), base.store.infos)
    found, before = skeleton.match(base.store.infos).readings, skeleton.canonical
    if own:
        skeleton = with_own_output(skeleton)
    readings = {name: found[before[name]] for name in skeleton.slots if before[name] in found}
    return Base(base.source, skeleton, base.store, readings, split(skeleton, base.skeleton).head)


def in_block(name: str) -> bool:
    """Whether a tensor belongs to one of the blocks that a model repeats."""
    return any(part.isdigit() for part in name.split("."))


def shape_listing(shapes: Mapping[str, tuple[object, object]]) -> str:
    """Names with two shapes side by side, for an error."""
    return listing((f"{name}: {a} against {b}" for name, (a, b) in shapes.items()), most=200)


def narrow(base: Base, expert: Skeleton) -> Base:
    """The part of the base that an expert is a version of.

    Most often that is all of it. An expert of CLIP's vision tower, given a whole CLIP model as base, asks for the tower.
    """
    if expert.submodule(type(base.skeleton.model)) is not None or _holds(expert, base.skeleton):
        return base
    if _holds(base.skeleton, expert):  # CLIP's vision tower with its projection: the same names, fewer of them
        held = {name: base.readings.get(base.skeleton.canonical[name]) for name in expert.slots}
        return Base(base.source, expert, base.store, {name: r for name, r in held.items() if r is not None})
    for module in expert.model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        prefix = base.skeleton.submodule(type(module))
        if prefix:
            part = build(module.config, type(module).__name__)
            readings = {
                part.canonical[name.removeprefix(prefix)]: reading
                for name, reading in base.readings.items()
                if name.startswith(prefix) and name.removeprefix(prefix) in part.canonical
            }
            return Base(base.source, part, base.store, readings)
    raise InputError(
        f"is a {expert.class_name}, which has no {base.skeleton.class_name} in it; the base is a "
        f"{base.skeleton.class_name}. An expert must be fine-tuned from the recipe's base."
    )


def _holds(expert: Skeleton, base: Skeleton) -> bool:
    """Whether every tensor of the base has its namesake in the expert (T5 with a language head has no T5Model inside)."""
    return all(name in expert.canonical for name in base.slots)


def split(expert: Skeleton, base: Skeleton) -> Split:
    """Divide a task's model into the base's backbone and the rest, its head."""
    prefix = expert.submodule(type(base.model)) or ""
    # An expert may be a part of the base: CLIP's vision tower without the projection behind it.
    around = "" if prefix else base.submodule(type(expert.model)) or ""
    children = {name for name, _ in base.model.named_children()}
    backbone: dict[str, str] = {}
    head: list[str] = []
    extra: list[str] = []
    tied: dict[str, str] = {}
    for slot in expert.slots.values():
        names = [around + n.removeprefix(prefix) for n in (slot.name, *slot.aliases) if n.startswith(prefix)]
        inside = list(dict.fromkeys(base.canonical[n] for n in names if n in base.canonical))
        if inside:
            backbone[slot.name] = inside[0]
            tied |= dict.fromkeys(inside[1:], slot.name)
        elif any(name.partition(".")[0] in children for name in names):
            extra.append(slot.name)
        else:
            head.append(slot.name)
    return Split(backbone, tuple(head), tuple(extra), tied)


def config_differences(expert: PretrainedConfig, base: PretrainedConfig) -> list[str]:
    """Fields that differ and could change what the same weights compute."""
    ours, theirs = base.to_dict(), expert.to_dict()
    return [
        f"{key}: {theirs[key]!r} against the base's {ours[key]!r}"
        for key in sorted(ours.keys() & theirs.keys() - HARMLESS)
        if ours[key] != theirs[key]
    ]


def label_slots(config: PretrainedConfig, class_name: str) -> dict[str, int]:
    """Tensors whose size depends on the number of labels, with the dimension that does."""
    wider = type(config).from_dict(config.to_dict())
    wider.num_labels = config.num_labels + 1
    ours, theirs = shape_of(config, class_name).slots, shape_of(wider, class_name).slots
    return {
        name: next(d for d, (a, b) in enumerate(zip(slot.shape, theirs[name].shape, strict=True)) if a != b)
        for name, slot in ours.items()
        if slot.shape != theirs[name].shape
    }


def infer_task_model(
    backbone: Skeleton, infos: Mapping[str, TensorInfo], candidates: Iterable[str] = ()
) -> tuple[Skeleton, Match]:
    """The task model that weights belong to which name no class: the class, and the number of labels it must have.

    Args:
        backbone: the backbone without a head, whose configuration the task model shares.
        infos: names and shapes in the file.
        candidates: class names to try first.
    """
    config = backbone.config
    names = [*candidates, *_task_classes(config)]
    best: tuple[Skeleton, Match] | None = None
    for class_name in dict.fromkeys([backbone.class_name, *names]):
        try:
            skeleton = untie_output(_with_labels(config, class_name, infos), infos)
        except InputError:
            continue  # a candidate of another architecture, which the base's configuration cannot build
        match = skeleton.match(infos)
        if best is None or len(match.unexpected) < len(best[1].unexpected):
            best = skeleton, match
        if not match.unexpected:
            break
    assert best is not None
    return best


def _task_classes(config: PretrainedConfig) -> list[str]:
    found = (mapping.get(config.model_type) for mapping in _TASK_CLASSES)
    names = [name for entry in found if entry for name in ([entry] if isinstance(entry, str) else entry)]
    return [name for name in names if hasattr(transformers, name)]


def _with_labels(config: PretrainedConfig, class_name: str, infos: Mapping[str, TensorInfo]) -> Skeleton:
    """The class with as many labels as the file's head has rows."""
    skeleton = shape_of(config, class_name)
    slots = label_slots(config, class_name)
    for key, (target, _) in skeleton.rename(infos).items():
        if target in slots and len(infos[key].shape) > slots[target]:
            resized = type(config).from_dict(config.to_dict())
            resized.num_labels = infos[key].shape[slots[target]]
            return shape_of(resized, class_name)
    return skeleton


def feature_width(backbone: PreTrainedModel) -> int | None:
    """The width of the features that a head reads, if the configuration tells."""
    name = "projection_dim" if hasattr(backbone, "visual_projection") else "hidden_size"
    width = getattr(backbone.config, name, None)
    return None if width is None else int(width)
