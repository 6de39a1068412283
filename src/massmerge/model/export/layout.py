"""Which parts of PEFT hold what a task changes: LoRA matrices, biases, and modules that are saved whole."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

Adapters = Literal["together", "alone", "lora"]


@dataclass
class Layout:
    """Module paths in the task's model, by what holds their change."""

    lora: set[str] = field(default_factory=set)
    biases: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    """Modules of which the adapter holds a copy (`modules_to_save`)."""
    left_out: list[str] = field(default_factory=list)
    """Tensors that no part of PEFT holds."""

    def holds_whole(self, path: str) -> bool:
        """Whether a module is inside one that is saved whole."""
        return any(path == saved or path.startswith(f"{saved}.") for saved in self.saved)


def make_layout(
    model: nn.Module, factored: Iterable[str], whole: Iterable[str], head: Iterable[str], adapters: Adapters
) -> Layout:
    """Where PEFT can hold each tensor that a task changes, exactly.

    Args:
        model: the task's model, as PEFT will wrap it.
        factored: names in it of the tensors that the task has factors of.
        whole: names of those that it has a value of its own of.
        head: names of the head's tensors.
        adapters: `lora` for LoRA matrices alone; `alone` for the smallest adapter, of which PEFT can hold one in a model;
            `together` for adapters that it can hold side by side. The difference is where biases go: PEFT replaces the
            model's own, or adds them to the LoRA layers, which embeddings do not know; those are then saved whole.
    """
    layout = Layout()
    for name in factored:
        path, _, own = name.rpartition(".")
        if own == "weight" and _takes_lora(model.get_submodule(path)):
            layout.lora.add(path)
        else:
            _save(layout, name, adapters)
    for name in whole:
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        if own == "bias" and adapters != "lora" and _takes_lora(module):
            layout.biases.add(path)
        else:
            _save(layout, name, adapters)
    if adapters != "lora":
        for name in head:
            _save(layout, name, adapters)
    if adapters == "together" and layout.biases:
        embeddings = {path for path in layout.lora if isinstance(model.get_submodule(path), nn.Embedding)}
        layout.saved |= embeddings
    _close(layout, [path for path, _ in model.named_modules() if path])
    return layout


def _takes_lora(module: nn.Module) -> bool:
    """Whether PEFT's LoRA layer of this module computes with all of its settings."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return module.groups == 1 and set(module.dilation) == {1} and module.padding_mode == "zeros"
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq
    return isinstance(module, nn.Linear | Conv1D)


def _save(layout: Layout, name: str, adapters: Adapters) -> None:
    """Save the module that owns a tensor, if there is one below the model itself."""
    path = name.rpartition(".")[0]
    if path and adapters != "lora":
        layout.saved.add(path)
    else:
        layout.left_out.append(name)


def _close(layout: Layout, paths: list[str]) -> None:
    """Add what PEFT will also save because of its name.

    It compares the ends of names, and puts no LoRA wherever such a name occurs.
    """
    wanted = set(layout.saved)
    layout.saved = {path for path in paths if any(path.endswith(name) for name in wanted)}
    inside = {path for path in layout.saved if any(path.startswith(f"{other}.") for other in layout.saved)}
    layout.saved -= inside
    hidden = {p for p in layout.lora | layout.biases if any(re.match(rf"(^|.*\.){m}($|\..*)", p) for m in wanted)}
    layout.saved |= {path for path in hidden if not layout.holds_whole(path)}
    layout.lora = {path for path in layout.lora if not layout.holds_whole(path)}
    layout.biases = {path for path in layout.biases if not layout.holds_whole(path)}
