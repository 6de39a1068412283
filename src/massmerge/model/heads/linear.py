"""Heads of linear layers, and the features that they read of a backbone's output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor
from torch.nn import functional

from massmerge.bundle.layout import LINEAR
from massmerge.bundle.problem_types import problem_of
from massmerge.errors import InputError
from massmerge.io.json_file import read_json
from massmerge.io.tensor_file import TensorInfo, read_header, read_tensor
from massmerge.model.route.first_pass import pool
from massmerge.recipe import MOST_LAYERS, Activation

Features = Literal["auto", "pooled", "cls", "mean"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "tanh": torch.tanh,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


class _Layer(BaseModel):
    """What is done with the output of a layer."""

    activation: Activation = "none"
    normalize: bool = False


class _Options(BaseModel):
    """What a bundle says about such a head."""

    normalize: bool
    scale: float
    features: Features = "auto"
    problem_type: str | None = None
    layers: list[_Layer] | None = Field(None, min_length=1, max_length=MOST_LAYERS)


class LinearHead:
    """Linear layers on the backbone's features: most often one."""

    def __init__(self, folder: Path, device: torch.device, width: int | None = None) -> None:
        path = folder / LINEAR
        try:
            self._options = _Options.model_validate(read_json(path))
        except (ValidationError, ValueError) as error:
            raise InputError(f"{path}: not the options of a head ({error}). Merge again.") from None
        header = read_header(folder / "model.safetensors")
        names = [""] if self._options.layers is None else [f"{i}." for i in range(len(self._options.layers))]
        _refuse_shapes(folder, header, names, width)
        self._layers = [
            (read_tensor(header[f"{name}weight"]).float().to(device),
             read_tensor(header[f"{name}bias"]).float().to(device) if f"{name}bias" in header else None)
            for name in names
        ]  # fmt: skip
        self.labels_expected = self._layers[-1][0].shape[0]
        self.problem_type = problem_of(self._options.problem_type, self.labels_expected)

    @torch.inference_mode()
    def __call__(self, output: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Logits (batch, labels) for the backbone's output on these inputs."""
        return self.logits(output, inputs)

    def logits(self, output: Any, inputs: dict[str, Tensor]) -> Tensor:
        """The same, with gradients with respect to the output where they are on."""
        x = features(output, inputs, self._options.features)
        if self._options.normalize:
            x = functional.normalize(x, dim=1)
        x = x * self._options.scale
        for (weight, bias), after in zip(self._layers, self._options.layers or [_Layer()], strict=True):
            x = _ACTIVATIONS[after.activation](functional.linear(x, weight, bias))
            x = functional.normalize(x, dim=1) if after.normalize else x
        return x


def _refuse_shapes(folder: Path, header: dict[str, TensorInfo], names: list[str], width: int | None) -> None:
    """Refuse tensors that are not layers which follow from each other, the first one on `width` features."""
    for name in names:
        weight, bias = header.get(f"{name}weight"), header.get(f"{name}bias")
        fits = weight is not None and len(weight.shape) == 2 and width in (None, weight.shape[1])
        if weight is None or not fits or (bias is not None and bias.shape != weight.shape[:1]):
            raise InputError(f"{folder}: its tensors are no head on {width} features. Merge again.")
        width = weight.shape[0]


def features(output: Any, inputs: dict[str, Tensor], kind: Features = "auto") -> Tensor:
    """One vector (batch, width) for each input of a backbone's output.

    `auto` is the backbone's own pooled output if it has one, else the mean over real tokens for text (of an encoder-decoder:
    of its encoder's output) and the first token for images.
    """
    pooled = getattr(output, "image_embeds", None)  # of a vision tower with its projection
    pooled = getattr(output, "pooler_output", None) if pooled is None else pooled
    if kind == "pooled" and pooled is None:
        raise InputError("the backbone has no pooled output; choose `features: cls` or `mean`.")
    if pooled is not None and kind in ("auto", "pooled"):
        return pooled.float()
    # An encoder-decoder's features are those of the prompt; what its decoder says of it is one token long.
    hidden = getattr(output, "encoder_last_hidden_state", None)
    hidden = output.last_hidden_state if hidden is None else hidden
    text = "input_ids" in inputs
    token = kind if kind in ("cls", "mean") else ("mean" if text else "cls")
    mask = inputs.get("attention_mask")
    return pool(hidden, "mean" if token == "mean" else "cls", mask, hidden.shape[0])
