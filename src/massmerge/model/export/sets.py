"""One selected set as a model of its own: the base with the set's changes, and the head where the set is one task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from massmerge.bundle.layout import LABELS
from massmerge.bundle.reader import Bundle
from massmerge.checkpoints.backbone import HARMLESS, language_class
from massmerge.checkpoints.pretrained import pretrained_config
from massmerge.checkpoints.skeleton import Skeleton, build, untie_output
from massmerge.errors import InputError
from massmerge.io.tensor_file import TensorInfo, read_header, read_tensor
from massmerge.model.heads.classify import ShellHead, with_decoder_start
from massmerge.model.heads.language import LanguageShell
from massmerge.model.heads.linear import LinearHead
from massmerge.model.load import load
from massmerge.model.model import Model
from massmerge.model.second_pass.install import dense_value
from massmerge.model.second_pass.segments import Segment, Segments, running
from massmerge.model.second_pass.updates import SetChanges
from massmerge.model.trees import shared_copy
from massmerge.routing.sites import probe_inputs

TOLERANCE = 1e-4
"""How far outputs may be from the bundle's, as a share of the largest."""


class Around(NamedTuple):
    """What is put around the backbone to answer: a class of transformers, and the tensors that the backbone lacks."""

    config: PretrainedConfig
    name: str
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class OpenBundle:
    """A bundle with what runs it."""

    bundle: Bundle
    model: Model

    @classmethod
    def open(cls, path: str | Path) -> OpenBundle:
        """Load a bundle; every checksum is compared first."""
        return cls(Bundle(path, check=True), load(path, device="cpu", dtype="float32", check=False))

    def positions(self, tasks: Sequence[str] | None) -> tuple[int, ...]:
        """Positions of the named tasks, all if none are named.

        Raises:
            InputError: a task that the bundle lacks, or no task.
        """
        try:
            return tuple(self.model.core.positions(tasks))
        except InputError as error:
            raise InputError(f"{self.bundle.path}: {error}") from None

    def changes(self, positions: tuple[int, ...]) -> SetChanges:
        """What a set changes.

        Raises:
            InputError: the recipe weighs the tasks of a set by the router, so that each input has a merge of its own.
        """
        if self.model.sets.merge == "weighted" and len(positions) > 1:
            raise InputError(
                f"{self.bundle.path}: its recipe says `answer: {{merge: weighted}}`, so a set of several tasks is merged "
                "anew for each input. Export one task, or merge with `orthogonal` or `plain`."
            )
        return self.model.sets.changes(positions)

    def around(self, tasks: Sequence[str]) -> Around | None:
        """The head of a set where that is a class of transformers: the classifier of one task, or a language model.

        Like all tensors without factors, the output layers of tasks that write are the mean over the set.
        """
        base = self.model.core.base
        if len(tasks) == 1 and isinstance(self.model.core.heads.get(tasks[0]), ShellHead):
            folder = self.head_folder(tasks[0])
            config = task_config(folder, base.config)
            header = read_header(folder / "model.safetensors")
            return Around(config, config.architectures[0], {n: read_tensor(i).float() for n, i in header.items()})
        name = language_class(base.config)
        if name is None or any(task in self.model.labels for task in tasks):
            return None
        shell = LanguageShell(base)
        found = shell.stored(self.bundle.path, tasks)
        return Around(base.config, name, found) if found.keys() >= set(shell.own) else None

    def linear(self, tasks: Sequence[str]) -> LinearHead | None:
        """The head of a set of one task where that is a linear layer."""
        head = self.model.core.heads.get(tasks[0]) if len(tasks) == 1 else None
        return head if isinstance(head, LinearHead) else None

    def head_folder(self, task: str) -> Path:
        """The folder of a task's head."""
        return self.bundle.head_folder(task)


def set_model(opened: OpenBundle, changes: SetChanges | None, around: Around | None) -> PreTrainedModel:
    """A plain model of transformers with what a set changes.

    Args:
        opened: the bundle.
        changes: the set's; none for the base's own values.
        around: the set's head; none for the backbone alone.
    """
    base = opened.model.core.base
    state = dict(base.state_dict()) if changes is None else changed_state(base, changes)
    if around is None:
        model = shared_copy(base)
        model.load_state_dict(state, strict=False, assign=True)
        return model.eval()
    skeleton = build(around.config, around.name)
    prefix = skeleton.submodule(type(base)) or ""
    given = {f"{prefix}{name}": value for name, value in state.items()} | around.tensors
    model = type(skeleton.model)(around.config).eval()
    infos = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in given.items()}
    model = untie_output(Skeleton(model), infos).model
    # Copies: what is tied in the class stays tied.
    missing = set(model.load_state_dict(given, strict=False).missing_keys) - set(_tied(model))
    if missing:
        raise InputError(f"{opened.bundle.path}: a {around.name} also has {', '.join(sorted(missing))}.")
    return model


def changed_state(base: PreTrainedModel, changes: SetChanges) -> dict[str, Tensor]:
    """The base's tensors as a set has them, under each of their names."""
    skeleton, state = Skeleton(base), dict(base.state_dict())
    for slot in skeleton.slots.values():
        changed = dense_value(changes, slot, state[slot.name])
        if changed is not None:
            state |= dict.fromkeys((slot.name, *slot.aliases), changed)
    return state


def _tied(model: PreTrainedModel) -> list[str]:
    """Names that are another tensor's: they are filled with it."""
    return [alias for slot in Skeleton(model).slots.values() for alias in (slot.name, *slot.aliases) if slot.aliases]


def task_config(folder: Path, base: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a task's model; of the backbone the base's is said, as the bundle runs it."""
    config = pretrained_config(folder)
    if config.model_type == base.model_type:
        for key, value in base.to_dict().items():
            if key not in HARMLESS and key != "model_type" and hasattr(config, key):
                setattr(config, key, value)
    return config


def backbone_prefix(model: PreTrainedModel, base: PreTrainedModel) -> str:
    """Where the backbone lies in a task's model, with a final dot; "" where it is the model."""
    return Skeleton(model).submodule(type(base)) or ""


def random_inputs(base: PreTrainedModel, count: int = 2) -> dict[str, Tensor]:
    """Inputs of the right form, different from each other; the same at every call."""
    generator = torch.Generator().manual_seed(0)
    inputs = probe_inputs(base, count)
    if "pixel_values" in inputs:
        return {"pixel_values": torch.randn(inputs["pixel_values"].shape, generator=generator)}
    size = int(base.config.vocab_size)
    ids = torch.randint(min(5, size - 1), size, (count, 8), generator=generator)
    end = getattr(base.config, "eos_token_id", None)
    if isinstance(end, int) and end < size:
        ids[:, -1] = end  # some heads read the state of this token
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.inference_mode()
def bundle_output(
    opened: OpenBundle, changes: SetChanges, tasks: Sequence[str], inputs: dict[str, Tensor], *, logits: bool
) -> Tensor:
    """What the bundle's second pass gives: the logits of the set's head, or the last hidden state."""
    core, sets = opened.model.core, opened.model.sets
    head = core.heads.get(tasks[0]) if logits else None
    call = core.call(inputs)
    count = next(iter(inputs.values())).shape[0]
    segments = Segments((Segment(changes, 0, count),), count)
    if logits and head is None:
        with running(segments):
            written: Tensor = sets.language_models.of(changes)(**call).logits
        return written.float()
    output = sets.second_pass(call, segments)
    return head(output, inputs) if head else last_state(output)


@torch.inference_mode()
def model_output(model: Any, base: PreTrainedModel, inputs: dict[str, Tensor], *, logits: bool) -> Tensor:
    """What a plain model, or one that PEFT wraps, gives for the same inputs: logits, or the last hidden state."""
    rows = []
    count = next(iter(inputs.values())).shape[0]
    for i in range(count):  # one by one: without a padding token some heads refuse batches
        output = model(**with_decoder_start({name: tensor[i : i + 1] for name, tensor in inputs.items()}, base))
        rows.append(output.logits if logits else last_state(output))
    return torch.cat(rows).float()


def last_state(output: Any) -> Tensor:
    """What the backbone comes to: an image's embedding, or hidden states."""
    embedding = getattr(output, "image_embeds", None)
    found: Tensor = output.last_hidden_state if embedding is None else embedding
    return found


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of two outputs as a share of the largest number in them; infinite where shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))


def write_labels(opened: OpenBundle, tasks: Sequence[str], folder: Path) -> None:
    """The label names of a set of one task beside what was exported of it."""
    labels = opened.model.labels.get(tasks[0]) if len(tasks) == 1 else None
    if labels is not None:
        (folder / LABELS).write_text(json.dumps(list(labels), ensure_ascii=False) + "\n", encoding="utf-8")
