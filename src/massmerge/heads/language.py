"""Language heads: the family's own class of language model, around the modules of the second pass, for one selected set.

An output layer that is tied to the embeddings stays tied: it is the base's table with the set's update. One of its own is
stored by each task that has it, or once for the base, and like all tensors without factors the mean over the set.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from massmerge.bundle import GENERATION_CONFIG
from massmerge.checkpoints.backbone import language_class, split
from massmerge.checkpoints.skeleton import Skeleton, build
from massmerge.errors import InputError
from massmerge.subspace import SecondPass, SetChanges
from massmerge.subspace.modules import SubspaceLinear
from massmerge.tensorfile import read_header, read_tensor
from massmerge.trees import replace_module, shared_copy


class LanguageModels:
    """Makes the language model of each selected set, once.

    Args:
        base: the base.
        second_pass: its modules with the updates of sets.
        bundle: the bundle's folder, for heads that are stored.
        tasks: names of the tasks, in order.

    Raises:
        InputError: the base is no model that generates.
    """

    def __init__(self, base: PreTrainedModel, second_pass: SecondPass, bundle: Path, tasks: list[str]) -> None:
        name = language_class(base.config)
        if name is None:
            raise InputError(
                f"a {type(base).__name__} generates no text. That takes an encoder-decoder such as T5, or a decoder such as "
                "Llama. Use `predict`."
            )
        self._base, self._second_pass, self._bundle, self._tasks = base, second_pass, bundle, tasks
        skeleton = build(base.config, name)
        ours = Skeleton(base)
        self._inside = skeleton.submodule(type(base)) or ""
        parts = split(skeleton, ours)
        # Tied output layers: their names in the class, and the base's name of the tensor that they read.
        self._tied = {
            alias: parts.backbone[slot.name]
            for slot in skeleton.slots.values()
            if slot.name in parts.backbone
            for alias in (slot.name, *slot.aliases)
            if alias.removeprefix(self._inside) not in ours.canonical
        }
        self._own = parts.head
        self._shell = skeleton.model.eval()
        for path in self._backbone_paths():
            replace_module(self._shell, path, nn.Identity())
        own = bundle / "base"
        said = (own / GENERATION_CONFIG).is_file()
        self.defaults: GenerationConfig = (
            GenerationConfig.from_pretrained(own) if said else self._shell.generation_config
        )
        """How the base generates where no option says otherwise."""
        self._lock = threading.Lock()

    def of(self, changes: SetChanges) -> PreTrainedModel:
        """The language model of a set; its second pass must run inside `running`."""
        with self._lock:
            found = changes.modules.get(id(self))
            if found is None:
                found = changes.modules[id(self)] = self._make(changes)
        assert isinstance(found, PreTrainedModel)
        return found

    def _backbone_paths(self) -> list[str]:
        """Where the backbone stands in the class: one module, or (T5) each of its parts."""
        if self._inside:
            return [self._inside.rstrip(".")]
        return [name for name, _ in self._base.named_children()]

    def _make(self, changes: SetChanges) -> PreTrainedModel:
        model = shared_copy(self._shell)
        backbone = self._second_pass.of(changes)
        for path in self._backbone_paths():
            replace_module(model, path, backbone if self._inside else backbone.get_submodule(path))
        heads = self._stored(changes)
        missing = [name for name in self._own if name not in heads]
        if missing:
            tasks = ", ".join(self._tasks[t] for t in changes.tasks)
            raise InputError(
                f"{tasks}: the bundle holds no {', '.join(missing)}, which turns features into words. Merge again, with a "
                "base or experts that have it."
            )
        for name, tensor in heads.items():
            _assign(model, name, tensor)
        for name, tensor_name in self._tied.items():
            if name not in heads:
                self._tie(model, name, tensor_name)
        return model

    def _tie(self, model: PreTrainedModel, name: str, tensor: str) -> None:
        """Let an output layer read the base's table, with the update of the running set."""
        owner = name.removesuffix(".weight")
        layer = model.get_submodule(owner)
        _assign(model, name, self._base.get_parameter(tensor))
        replace_module(model, owner, SubspaceLinear(layer, tensor, f"{owner}.bias", transposed=False))

    def _stored(self, changes: SetChanges) -> dict[str, Tensor]:
        """The set's own output layers: the mean over its tasks, or the base's where no task has any."""
        folders = [self._bundle / "tasks" / self._tasks[task] for task in changes.tasks]
        base = self._bundle / "base"
        found = [read_header(f) for f in _head_files(folders)] or [read_header(f) for f in _head_files([base])]
        names = [n for n in (*self._own, *self._tied) if any(n in header for header in found)]
        return {n: torch.stack([read_tensor(h[n]).float() for h in found if n in h]).mean(0).to(self._base.device)
                for n in names}  # fmt: skip


def _head_files(folders: list[Path]) -> list[Path]:
    """The tensors of heads that are classes of transformers."""
    return [f / "head" / "model.safetensors" for f in folders if (f / "head" / "config.json").is_file()]


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor in the place of one that has only a shape."""
    path, _, own = name.rpartition(".")
    owner = model.get_submodule(path)
    if own in owner._buffers:
        owner._buffers[own] = value
    else:
        owner._parameters[own] = nn.Parameter(value, requires_grad=False)
