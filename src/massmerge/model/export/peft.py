"""Tasks as PEFT adapters: the factors as LoRA matrices, everything else where PEFT can hold it."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from massmerge.bundle.reader import Bundle
from massmerge.checkpoints.adapters import ADAPTER_CONFIG
from massmerge.checkpoints.pretrained import pretrained_adapter
from massmerge.checkpoints.skeleton import Skeleton
from massmerge.errors import InputError
from massmerge.io.tensor_file import write_tensors
from massmerge.model.export.checkpoint import write_head_beside
from massmerge.model.export.layout import Adapters, Layout, make_layout
from massmerge.model.export.parts import Part
from massmerge.model.export.sets import (
    OpenBundle,
    backbone_prefix,
    bundle_output,
    changed_state,
    model_output,
    random_inputs,
    relative_difference,
    set_model,
    write_labels,
)
from massmerge.model.second_pass.updates import SetChanges

_WRAPPED = "base_model.model."
WEIGHTS = "adapter_model.safetensors"


def write_adapter(opened: OpenBundle, position: int, folder: Path, adapters: Adapters) -> Part:
    """Write one task as an adapter's folder, and compare what PEFT makes of it with the bundle.

    Raises:
        InputError: peft is not installed, or the task changes nothing that LoRA holds.
    """
    peft = _peft()
    task = opened.model.tasks[position]
    changes = opened.changes((position,))
    around = opened.around([task])
    own_head = list(around.tensors) if around else []
    model = set_model(opened, None, around)  # the base's values, with the task's head
    state, left_out = _state(opened, model, changes)
    layout = make_layout(model, state.factored, state.whole, own_head, adapters)
    left_out += layout.left_out
    if not layout.lora:
        raise InputError(f"{opened.bundle.path}: {task} changes no layer that LoRA knows; export it with --to hf.")
    tensors = _tensors(model, layout, state, adapters)
    folder.mkdir()
    _write_config(peft, folder, opened.bundle, model, layout, state, adapters)
    dtype = getattr(torch, opened.bundle.base_dtype)
    write_tensors(folder / WEIGHTS, {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    write_labels(opened, [task], folder)
    head = "inside" if around and (adapters != "lora" or not own_head) else write_head_beside(opened, [task], folder)
    difference = _difference(peft, opened, model, changes, folder, logits=around is not None)
    shares = _shares(opened, changes, [name.removeprefix(state.prefix) for name in left_out])
    return Part(task, folder.name, difference, max(state.ranks.values(), default=0), shares, head)


def _difference(
    peft: Any, opened: OpenBundle, model: PreTrainedModel, changes: SetChanges, folder: Path, *, logits: bool
) -> float:
    """How far what PEFT makes of the adapter, in the folder of its task's name, is from the bundle."""
    base = opened.model.core.base
    inputs = random_inputs(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied weights, which the comparison is about
        loaded = pretrained_adapter(peft, model, folder)
    found = model_output(loaded, base, inputs, logits=logits)
    return relative_difference(found, bundle_output(opened, changes, [folder.name], inputs, logits=logits))


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise InputError("--to peft needs peft: pip install 'massmerge[lora]'.") from None
    return peft


class _State:
    """What one task has of each tensor, under the names of the task's model."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.values: dict[str, Tensor] = {}
        """Every tensor of the task's model, as the task has it."""
        self.factored: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self.whole: set[str] = set()

    @property
    def ranks(self) -> dict[str, int]:
        """Ranks of the factors, by module."""
        return {name.rpartition(".")[0]: len(s) for name, (_, s, _) in self.factored.items()}


def _state(opened: OpenBundle, model: PreTrainedModel, changes: SetChanges) -> tuple[_State, list[str]]:
    """The task's tensors, and the names of those that the task's model does not have."""
    base, skeleton = opened.model.core.base, Skeleton(model)
    state = _State(backbone_prefix(model, base))
    state.values = dict(model.state_dict())
    values = changed_state(base, changes)
    missing: list[str] = []
    for slot in Skeleton(base).slots.values():
        change = changes.change(slot.name)
        if change.update is None and change.value is None:
            continue
        names = _tied_names(skeleton, [f"{state.prefix}{name}" for name in (slot.name, *slot.aliases)])
        if not names:
            missing.append(f"{state.prefix}{slot.name}")
        state.values |= dict.fromkeys(names, values[slot.name])
        if change.update is not None:
            triple = (change.update.us[0], change.update.core, change.update.vs[0])
            state.factored |= dict.fromkeys(names, triple)
        else:
            state.whole |= names
    return state, missing


def _tied_names(skeleton: Skeleton, names: list[str]) -> set[str]:
    """Of these names those that the task's model has, with all that are tied to them there: output layers, for one."""
    slots = [skeleton.slots[skeleton.canonical[name]] for name in names if name in skeleton.canonical]
    return {name for slot in slots for name in (slot.name, *slot.aliases)}


def _tensors(model: PreTrainedModel, layout: Layout, state: _State, adapters: Adapters) -> dict[str, Tensor]:
    """What the adapter's file holds, under the names that PEFT looks for."""
    found: dict[str, Tensor] = {}
    for path in layout.lora | layout.biases:
        module = model.get_submodule(path)
        name = f"{_WRAPPED}{path}"
        triple = state.factored.get(f"{path}.weight")
        if path not in layout.lora or triple is None:
            triple = _nothing(module)
        if path in layout.lora or adapters == "together":
            found |= {f"{name}.{key}": tensor for key, tensor in _lora(module, *triple).items()}
        if adapters == "alone" and path in layout.biases:
            inside = ".base_layer" if path in layout.lora else ""
            found[f"{name}{inside}.bias"] = state.values[f"{path}.bias"]
        elif adapters == "together" and layout.biases:
            found[f"{name}.lora_B.bias"] = _bias_change(model, path, state, triple[0])
    for path in layout.saved:
        found |= {f"{_WRAPPED}{n}": tensor for n, tensor in state.values.items() if n.startswith(f"{path}.")}
    return found


def _lora(module: nn.Module, u: Tensor, s: Tensor, v: Tensor) -> dict[str, Tensor]:
    """`u s v` as LoRA's two matrices, the singular values divided between them."""
    half = s.sqrt()
    b, a = u * half, half[:, None] * v
    if isinstance(module, nn.Embedding):  # PEFT keeps those of the transposed weight
        return {"lora_embedding_A": b.mT, "lora_embedding_B": a.mT}
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        ones = (1,) * len(module.kernel_size)
        a, b = a.reshape(-1, module.in_channels, *module.kernel_size), b.reshape(*b.shape, *ones)
    return {"lora_A.weight": a, "lora_B.weight": b}


def _nothing(module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of no change, for a layer of which only the bias changes."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape[0], math.prod(weight.shape[1:])
    if isinstance(module, Conv1D):
        rows, columns = columns, rows
    return torch.zeros(rows, 1), torch.zeros(1), torch.zeros(1, columns)


def _bias_change(model: PreTrainedModel, path: str, state: _State, u: Tensor) -> Tensor:
    """The change of a layer's bias; zeros where it has none, for PEFT gives every LoRA layer one."""
    bias = getattr(model.get_submodule(path), "bias", None)
    return torch.zeros(u.shape[0]) if bias is None else (state.values[f"{path}.bias"] - bias).detach()


def _write_config(
    peft: Any, folder: Path, bundle: Bundle, model: PreTrainedModel, layout: Layout, state: _State, adapters: Adapters
) -> None:
    together = adapters == "together" and bool(layout.biases)
    targets = sorted(layout.lora | layout.biases if together else layout.lora)
    ranks = {path: state.ranks.get(path, 1) if path in layout.lora else 1 for path in targets}
    most = max(ranks.values())
    # alpha = r everywhere: the factor on the product is 1, also for software that looks at the first of them only.
    pattern = {re.escape(path): rank for path, rank in ranks.items() if rank != most}
    source, revision = _base_reference(bundle)
    config = peft.LoraConfig(
        r=most,
        lora_alpha=most,
        rank_pattern=pattern,
        alpha_pattern=pattern,
        target_modules=_exact_names(targets, model),
        modules_to_save=sorted(layout.saved) or None,
        fan_in_fan_out=any(isinstance(model.get_submodule(path), Conv1D) for path in targets),
        bias="all" if adapters == "alone" and layout.biases else "none",
        lora_bias=together,
        base_model_name_or_path=source,
        revision=revision,
        inference_mode=True,
    )
    data = config.to_dict()
    data["auto_mapping"] = {"base_model_class": type(model).__name__, "parent_library": "transformers"}
    data = {key: sorted(value) if isinstance(value, set) else value for key, value in data.items()}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _exact_names(targets: list[str], model: nn.Module) -> list[str] | str:
    """The modules' paths; as one pattern where a path is also the end of another module's, which PEFT would take for it."""
    wanted, ends = set(targets), tuple(f".{path}" for path in targets)
    if any(path.endswith(ends) and path not in wanted for path, _ in model.named_modules()):
        return "|".join(re.escape(path) for path in targets)
    return targets


def _base_reference(bundle: Bundle) -> tuple[str, str | None]:
    """What an adapter says of its base: the hub's id and commit, else the folder."""
    said = bundle.manifest["base"]
    if said["revision"]:
        return str(said["source"]).partition("@")[0], str(said["revision"])
    return (str(bundle.base_folder.resolve()) if bundle.base_weights else str(said["location"])), None


def _shares(opened: OpenBundle, changes: SetChanges, left_out: list[str]) -> dict[str, float]:
    """Of tensors that were left out, the share of the square of all changes that theirs are."""
    if not left_out:
        return {}
    base = dict(opened.model.core.base.state_dict())
    state = changed_state(opened.model.core.base, changes)
    squares = {name: float((state[name] - base[name]).double().square().sum()) for name in base
               if base[name].is_floating_point()}  # fmt: skip
    total = sum(squares.values()) or 1.0
    return {name: squares.get(name, 0.0) / total for name in left_out}
