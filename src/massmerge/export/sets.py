"""One selected set as a model of its own: the base with the set's changes, and the head where the set is one task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from massmerge.bundle import Bundle
from massmerge.checkpoints.backbone import HARMLESS
from massmerge.checkpoints.skeleton import Skeleton, build
from massmerge.errors import InputError
from massmerge.heads.runtime import ShellHead
from massmerge.routing.sites import probe_inputs
from massmerge.runtime import Runtime, load_runtime, with_decoder_start
from massmerge.subspace.install import dense_value
from massmerge.subspace.segments import Segment, Segments
from massmerge.subspace.updates import SetChanges
from massmerge.tensorfile import read_header, read_tensor
from massmerge.trees import shared_copy

TOLERANCE = 1e-4
"""How far outputs may be from the bundle's, as a share of the largest."""


@dataclass(frozen=True)
class OpenBundle:
    """A bundle with what runs it."""

    bundle: Bundle
    runtime: Runtime

    @classmethod
    def open(cls, path: str | Path) -> OpenBundle:
        """Load a bundle; every checksum is compared first."""
        return cls(Bundle(path, check=True), load_runtime(Path(path), device="cpu", check=False))

    def positions(self, tasks: Sequence[str] | None) -> tuple[int, ...]:
        """Positions of the named tasks, all if none are named.

        Raises:
            InputError: a task that the bundle lacks, or no task.
        """
        known = self.runtime.tasks
        wanted = known if tasks is None else list(tasks)
        unknown = [name for name in wanted if name not in known]
        if unknown or not wanted:
            wrong = f"no task {', '.join(map(repr, unknown))}" if unknown else "an empty list of tasks"
            raise InputError(f"{self.bundle.path}: {wrong}. There are {', '.join(known)}.")
        return tuple(i for i, name in enumerate(known) if name in wanted)

    def changes(self, positions: tuple[int, ...]) -> SetChanges:
        """What a set changes.

        Raises:
            InputError: the recipe weighs the tasks of a set by the router, so that each input has a merge of its own.
        """
        if self.runtime.recipe.answer.merge == "weighted" and len(positions) > 1:
            raise InputError(
                f"{self.bundle.path}: its recipe says `answer: {{merge: weighted}}`, so a set of several tasks is merged "
                "anew for each input. Export one task, or merge with `orthogonal` or `plain`."
            )
        return self.runtime.changes(positions)

    def shell(self, task: str) -> Path | None:
        """The folder of a task's head, if that is a model class of transformers and not a linear layer.

        A task that writes with the base's own language head has that one.
        """
        folder = self.head_folder(task)
        folder = folder if folder.is_dir() else self.bundle.path / "base" / "head"
        return folder if (folder / "config.json").is_file() else None

    def answers(self, task: str | None) -> bool:
        """Whether the model of a set gives the logits of a task's labels, and not hidden states or words."""
        return task is not None and isinstance(self.runtime.heads.get(task), ShellHead)

    def head_folder(self, task: str) -> Path:
        """The folder of a task's head."""
        return self.bundle.path / "tasks" / task / "head"


def set_model(opened: OpenBundle, changes: SetChanges | None, task: str | None) -> PreTrainedModel:
    """A plain model of transformers with what a set changes.

    Args:
        opened: the bundle.
        changes: the set's; none for the base's own values.
        task: whose head it has; none for the backbone alone, as for a task whose head is no model class.
    """
    base = opened.runtime.base
    state = dict(base.state_dict()) if changes is None else changed_state(base, changes)
    folder = None if task is None else opened.shell(task)
    if folder is None:
        model = shared_copy(base)
        model.load_state_dict(state, strict=False, assign=True)
        return model.eval()
    config = task_config(folder, base.config)
    skeleton = build(config, config.architectures[0])
    prefix = skeleton.submodule(type(base)) or ""
    head = {name: read_tensor(info).float() for name, info in read_header(folder / "model.safetensors").items()}
    model = type(skeleton.model)(config).eval()
    given = {f"{prefix}{name}": value for name, value in state.items()} | head
    # Copies: what is tied in the class stays tied.
    missing = set(model.load_state_dict(given, strict=False).missing_keys) - set(_tied(model))
    if missing:
        raise InputError(f"{opened.bundle.path}: a {skeleton.class_name} also has {', '.join(sorted(missing))}.")
    return model


def changed_state(base: PreTrainedModel, changes: SetChanges) -> dict[str, Tensor]:
    """The base's tensors as a set has them, under each of their names."""
    skeleton, state = Skeleton(base), dict(base.state_dict())
    for name, value in state.items():
        changed = dense_value(changes, skeleton.slots[skeleton.canonical[name]], value)
        if changed is not None:
            state[name] = changed
    return state


def _tied(model: PreTrainedModel) -> list[str]:
    """Names that are another tensor's: they are filled with it."""
    return [alias for slot in Skeleton(model).slots.values() for alias in (slot.name, *slot.aliases) if slot.aliases]


def task_config(folder: Path, base: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a task's model; of the backbone the base's is said, as the bundle runs it."""
    config = AutoConfig.from_pretrained(folder)
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


def bundle_output(opened: OpenBundle, changes: SetChanges, task: str | None, inputs: dict[str, Tensor]) -> Tensor:
    """What the bundle's second pass gives: the logits of the task's head, or the last hidden state."""
    runtime = opened.runtime
    head = None if task is None else runtime.heads.get(task)
    shell = head if isinstance(head, ShellHead) else None
    call = shell.backbone_call(inputs, runtime.base) if shell else with_decoder_start(inputs, runtime.base)
    count = next(iter(inputs.values())).shape[0]
    output = runtime.second_pass(call, Segments((Segment(changes, 0, count),), count))
    return shell(output, inputs) if shell else _last_state(output)


@torch.inference_mode()
def model_output(model: Any, base: PreTrainedModel, inputs: dict[str, Tensor], *, logits: bool) -> Tensor:
    """What a plain model, or one that PEFT wraps, gives for the same inputs: logits, or the last hidden state."""
    rows = []
    for i in range(
        next(iter(inputs.values())).shape[0]
    ):  # one by one: without a padding token some heads refuse batches
        row = with_decoder_start({name: tensor[i : i + 1] for name, tensor in inputs.items()}, base)
        output = model(**row, output_hidden_states=not logits)
        rows.append(output.logits if logits else _last_state(output))
    return torch.cat(rows).float()


def _last_state(output: Any) -> Tensor:
    """What the backbone comes to: an image's embedding, or hidden states; models that generate tell these among all."""
    found = getattr(output, "image_embeds", None)
    found = getattr(output, "last_hidden_state", None) if found is None else found
    if found is None:
        found = (getattr(output, "decoder_hidden_states", None) or output.hidden_states)[-1]
    assert isinstance(found, Tensor)
    return found


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of two outputs as a share of the largest number in them; infinite where shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))


def write_labels(opened: OpenBundle, task: str, folder: Path) -> None:
    """The label names of a task beside what was exported of it."""
    labels = opened.runtime.labels.get(task)
    if labels is not None:
        (folder / "labels.json").write_text(json.dumps(list(labels), ensure_ascii=False) + "\n", encoding="utf-8")
