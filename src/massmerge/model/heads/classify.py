"""Heads at work: the task's own model class around a stub that returns what the backbone has already computed."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from massmerge.bundle.layout import LABELS, LINEAR
from massmerge.bundle.problem_types import problem_of
from massmerge.checkpoints.backbone import feature_width
from massmerge.checkpoints.pretrained import pretrained_config
from massmerge.checkpoints.skeleton import build
from massmerge.errors import InputError, listing
from massmerge.io.json_file import read_json
from massmerge.io.tensor_file import read_header, read_tensor
from massmerge.io.untrusted import CONFIG, faults_in, refuse
from massmerge.model.heads.linear import LinearHead
from massmerge.model.trees import empty_copy, replace_module, widened

_NO_TOKEN = -1
_WEIGHTS = "model.safetensors"


class _Asked(Exception):
    """How a task's model calls its backbone."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args_given, self.kwargs_given = args, kwargs


class _Stub(nn.Module):
    """Stands where the backbone was; returns the output it was handed, or tells how it was called."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self._here = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Stub:
        """Each shell is handed outputs of its own."""
        return _Stub(self.config)

    def hand(self, output: Any) -> None:
        """The output that the next call in this thread returns; none to be told how the call looks."""
        self._here.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What was handed over."""
        output = getattr(self._here, "output", None)
        if output is None:
            raise _Asked(args, kwargs)
        return output


class ShellHead:
    """A head that is cut from any classification model of transformers, run by that model's own forward.

    Args:
        folder: its configuration and weights.
        base: the backbone.
        shells: empty shells that were made for other heads of this base; one that is made for this head is added.
    """

    def __init__(self, folder: Path, base: PreTrainedModel, shells: Shells | None = None) -> None:
        kind, shells = _kind(folder), {} if shells is None else shells
        if kind not in shells:
            shells[kind] = _empty_shell(folder, base)
        self._empty, self._device = shells[kind], base.device
        self._tensors = {n: read_tensor(i).float() for n, i in read_header(folder / _WEIGHTS).items()}
        wanted = {name: tensor.shape for name, tensor in self._empty.state_dict().items()}
        missing = wanted.keys() - self._tensors.keys()
        if missing:
            raise InputError(f"{folder}: the head lacks {', '.join(sorted(missing))}.")
        if any(self._tensors[name].shape != shape for name, shape in wanted.items()):
            _ = self._filled  # which says what is wrong
        config: Any = self._empty.config
        self.labels_expected: int = config.num_labels
        self.problem_type = problem_of(config.problem_type, config.num_labels)
        self._padding: int = config.pad_token_id

    @cached_property
    def _filled(self) -> tuple[nn.Module, _Stub]:
        """The shell with its weights, and the stub in it; made for the first input, for of many heads few are used."""
        shell = empty_copy(self._empty)
        shell.load_state_dict(self._tensors, strict=False, assign=True)
        return shell.to(self._device), next(module for module in shell.modules() if isinstance(module, _Stub))

    @torch.inference_mode()
    def backbone_call(self, inputs: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        """The keyword arguments with which the task's model would call its backbone."""
        shell, stub = self._filled
        stub.hand(None)
        try:
            shell(**inputs)
        except _Asked as asked:
            bound = inspect.signature(base.forward).bind_partial(*asked.args_given, **asked.kwargs_given)
            extra = bound.arguments.pop("kwargs", {})
            return {k: v for k, v in {**bound.arguments, **extra}.items() if v is not None}
        raise AssertionError("the task's model did not call its backbone")

    @torch.inference_mode()
    def __call__(self, output: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Logits (batch, labels) for the backbone's output on these inputs."""
        return self.logits(output, inputs)

    def logits(self, output: Any, inputs: dict[str, Tensor]) -> Tensor:
        """The same, with gradients with respect to the output where they are on."""
        if "input_ids" in inputs and "attention_mask" in inputs:
            ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, self._padding)
            inputs = {**inputs, "input_ids": ids}
        shell, stub = self._filled
        stub.hand(widened(output))
        try:
            found: Tensor = shell(**inputs).logits
            return found.float()
        finally:
            stub.hand(None)


Shells = dict[str, PreTrainedModel]
"""Task models without weights, a stub where their backbone was, by what their configurations say: see `_kind`."""


def _kind(folder: Path) -> str:
    """What a head's configuration says besides the names of its labels: hundreds of heads say the same.

    A kind of its own if more is in the folder than configuration and weights, of which transformers may read something too.
    """
    try:
        said = read_json(folder / CONFIG)
        labels = said["id2label"]
        if not isinstance(labels, dict) or {path.name for path in folder.iterdir()} != {CONFIG, _WEIGHTS}:
            return str(folder)
    except (ValueError, KeyError, TypeError):
        return str(folder)  # who opens it will say what is wrong
    refuse(folder / CONFIG, faults_in(said))
    rest = {name: value for name, value in said.items() if name not in ("id2label", "label2id")}
    return json.dumps([rest, len(labels)], sort_keys=True)


def _empty_shell(folder: Path, base: PreTrainedModel) -> PreTrainedModel:
    """The task model that a head's configuration describes, without weights, and with a stub for the backbone."""
    config = pretrained_config(folder)
    skeleton = build(config, config.architectures[0])
    path = (skeleton.submodule(type(base)) or "").rstrip(".")
    if not path:
        raise InputError(f"{folder}: a {skeleton.class_name} has no {type(base).__name__} in it.")
    shell = skeleton.model.eval()
    _refuse_other_backbone(folder, shell.get_submodule(path), base)
    replace_module(shell, path, _Stub(config))
    # Models that read the last real token know padding by the token's number. The batch is padded as the base says, and
    # experts disagree with it, or name none and refuse batches; a number that is no token's stands for those.
    if getattr(config, "pad_token_id", None) is None:
        shell.config.pad_token_id = _NO_TOKEN
    return shell


def _refuse_other_backbone(folder: Path, described: nn.Module, base: PreTrainedModel) -> None:
    """Refuse a head for a backbone of other sizes than the base, whose output it could not take."""
    ours = {name: tensor.shape for name, tensor in base.state_dict().items()}
    other = [name for name, t in described.state_dict().items() if t.shape != ours.get(name, t.shape)]
    if other:
        raise InputError(f"{folder}: its config.json describes another backbone:{listing(other)}\n  Merge again.")


Head = ShellHead | LinearHead


def load_head(folder: Path, base: PreTrainedModel, shells: Shells | None = None) -> Head | None:
    """The head in a task's folder; none where the task has none. Whoever loads several gives the same `shells` to all."""
    if (folder / LINEAR).is_file():
        return LinearHead(folder, base.device, feature_width(base))
    if (folder / "config.json").is_file() and (folder.parent / LABELS).is_file():
        return ShellHead(folder, base, shells)
    return None


def backbone_call(heads: Iterable[Head], inputs: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
    """The keyword arguments with which the models that heads were cut from would call their backbone."""
    shell = next((head for head in heads if isinstance(head, ShellHead)), None)
    return shell.backbone_call(inputs, base) if shell else with_decoder_start(inputs, base)


def with_decoder_start(inputs: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Tensor]:
    """The inputs of a forward pass; the decoder of an encoder-decoder wants a prompt of its own, its first token."""
    if not getattr(base.config, "is_encoder_decoder", False):
        return inputs
    start = getattr(base.config, "decoder_start_token_id", None) or 0
    return {**inputs, "decoder_input_ids": torch.full_like(inputs["input_ids"][:, :1], start)}
