"""A head of linear layers, given as a file: one layer, or several with an activation between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.core_model_loading import dot_natural_key

from massmerge.bundle.problem_types import problem_of
from massmerge.checkpoints import Base, Expert
from massmerge.checkpoints.backbone import feature_width
from massmerge.checkpoints.sentence import Sentence, find_sentence
from massmerge.checkpoints.stores import Store, open_file
from massmerge.errors import InputError, listing
from massmerge.io.remote_cache import path_of
from massmerge.io.tensor_file import TensorInfo
from massmerge.merging.heads.head import HeadSource, refuse_label_count
from massmerge.merging.heads.labels import read_labels
from massmerge.recipe import FileHead, TaskRecipe

_DENSE = "linear"  # what sentence-transformers calls the layer of a dense module


@dataclass(frozen=True)
class _Layer:
    """One linear layer: where it lies, and what is done with its output."""

    store: Store
    name: str
    """Of the module in the file; empty where the file is the layer."""
    activation: str = "none"
    normalize: bool = False

    def tensors(self) -> dict[str, str]:
        """`weight` and `bias` with their names in the file; there may be no bias."""
        names = {part: f"{self.name}.{part}".removeprefix(".") for part in ("weight", "bias")}
        return {part: name for part, name in names.items() if name in self.store.infos}

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and inputs."""
        return self.store.infos[self.tensors()["weight"]].shape

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(self.store.infos[name].nbytes for name in self.tensors().values())


def linear_head(task: TaskRecipe, head: FileHead, expert: Expert, base: Base, folder: Path) -> HeadSource:
    """The head that a recipe names as a file.

    Args:
        task: the task in the recipe.
        head: its head there.
        expert: its expert.
        base: what the expert is a version of.
        folder: what the recipe's paths are relative to.

    Raises:
        InputError: there is no such file, it holds no such layers, or they do not fit each other, the base or the labels.
    """
    path = path_of(head.weights, folder)
    if not path.is_file():
        raise InputError(f"{head.weights}: no such file (looked for {path.resolve()}).")
    if task.labels is not None:
        raise InputError("has its labels twice: in `labels:` and in `head: labels:`. Keep one.")
    sentence = _read_through(head, expert, base)
    before = [_Layer(d.store, _DENSE, d.activation, d.normalize) for d in sentence.dense] if sentence else []
    layers = [*before, *_layers(head, open_file(path))]
    _refuse_misfit(head, layers, feature_width(base.skeleton.model))
    labels = read_labels(head.labels, folder)
    refuse_label_count(labels, layers[-1].shape[0])
    undecided = head.features == "auto" and sentence is None
    return HeadSource(
        "linear", None, labels, sum(layer.nbytes for layer in layers), problem_of(task.problem_type, len(labels)),
        make=partial(_read, layers), options=_options(head, sentence, layers),
        features=partial(trained_features, base, expert) if undecided else None,
    )  # fmt: skip


def _read_through(head: FileHead, expert: Expert, base: Base) -> Sentence | None:
    """What stands between backbone and head by the expert's `modules.json`; the base's tells the pooling alone.

    A head that says what it reads reads that.
    """
    if head.features != "auto":
        return None
    own = find_sentence(expert.source)
    if own is not None:
        return own
    found = find_sentence(base.source)
    return None if found is None else Sentence(found.features)


def _layers(head: FileHead, store: Store) -> list[_Layer]:
    """The head's own layers, first to last."""
    names = [head.layers] if isinstance(head.layers, str) else head.layers
    if names is None:
        names = _all_layers(head, store.infos)
    layers = [_Layer(store, name) for name in names]
    absent = [layer.name for layer in layers if "weight" not in layer.tensors()]
    if absent:
        raise InputError(
            f"{head.weights}: has no layer {', '.join(absent)}. Its linear layers:{listing(_found(store.infos))}"
        )
    if len(layers) > 1 and head.activation is None:
        raise InputError(
            f"{head.weights}: a head of {len(layers)} layers ({', '.join(names)}). The file does not say what stands "
            "between them: give `activation:`, such as relu, or none."
        )
    return [*(replace(layer, activation=head.activation) for layer in layers[:-1]), layers[-1]]  # type: ignore[arg-type]


def _all_layers(head: FileHead, infos: Mapping[str, TensorInfo]) -> list[str]:
    """The layers of a file that holds nothing else: `weight` and `bias`, or those of a sequence of layers."""
    weight = infos.get("weight")
    if weight is not None and len(weight.shape) == 2 and infos.keys() <= {"weight", "bias"}:
        return [""]
    found = sorted(_found(infos), key=dot_natural_key)
    whole = {f"{name}.{part}" for name in found for part in ("weight", "bias")}
    sizes = [infos[f"{name}.weight"].shape for name in found]
    chained = all(a[0] == b[1] for a, b in pairwise(sizes))
    if found and chained and infos.keys() <= whole:
        return found
    choice = f" Name the head's layers in it with `layers:`:{listing(found)}" if found else ""
    raise InputError(
        f"{head.weights}: a linear head holds `weight (labels, features)` and optionally `bias`; "
        f"this file holds {_some(sorted(infos))}.{choice}"
    )


def _found(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Modules of a file that have a matrix, blocks of a backbone apart."""
    names = [name for name, info in infos.items() if name.endswith(".weight") and len(info.shape) == 2]
    modules = [name.removesuffix(".weight") for name in names]
    return [name for name in modules if not re.search(r"\d\..*\.|embeddings", name)]


def _some(names: list[str]) -> str:
    return str(names) if len(names) <= 8 else f"{len(names)} tensors"


def _refuse_misfit(head: FileHead, layers: list[_Layer], width: int | None) -> None:
    """Refuse layers whose sizes do not follow from each other."""
    for layer in layers:
        shape, names = layer.shape, layer.tensors()
        name = layer.name or "it"
        if len(shape) != 2:
            raise InputError(f"{head.weights}: {name} has a weight of shape {shape}; a layer's is (outputs, inputs).")
        if "bias" in names and layer.store.infos[names["bias"]].shape != shape[:1]:
            raise InputError(
                f"{head.weights}: bias {layer.store.infos[names['bias']].shape} does not fit weight {shape}."
            )
        if width is not None and shape[1] != width:
            giver = "the base" if layer is layers[0] else "the layer before"
            raise InputError(f"{head.weights}: {name} takes {shape[1]} features, {giver} gives {width}.")
        width = shape[0]


def _options(head: FileHead, sentence: Sentence | None, layers: list[_Layer]) -> dict[str, Any]:
    """How the head computes, as the bundle says it."""
    own = bool(sentence and sentence.normalize)
    options: dict[str, Any] = {
        "normalize": own if head.normalize is None else head.normalize,
        "scale": head.scale,
        "features": sentence.features if sentence else head.features,
    }
    if len(layers) > 1:
        options["layers"] = [{"activation": layer.activation, "normalize": layer.normalize} for layer in layers]
    return options


def _read(layers: list[_Layer]) -> dict[str, Tensor]:
    """The tensors under the names that a bundle has for them: numbered where there are several layers."""
    many = len(layers) > 1
    return {
        f"{i}.{part}" if many else part: layer.store.read(name)
        for i, layer in enumerate(layers)
        for part, name in layer.tensors().items()
    }


def trained_features(base: Base, expert: Expert) -> str:
    """What a linear head reads if the recipe leaves it open.

    A pooler that fine-tuning left as it was is not what the head was trained on: then it is the mean over the tokens of a
    text, or the first token of an image. Else it is `auto`.
    """
    poolers = [name for name in base.skeleton.slots if name.startswith("pooler.")]
    if not poolers or any(_changes(base, expert, name) for name in poolers):
        return "auto"
    return "cls" if base.skeleton.model.main_input_name == "pixel_values" else "mean"


def _changes(base: Base, expert: Expert, name: str) -> bool:
    """Whether an expert's tensor is another one than the base's."""
    if name not in expert.names() or name not in base.readings:
        return name in expert.names()
    return bool(expert.read(name).delta(base.read(name), base.slots[name]).any())
