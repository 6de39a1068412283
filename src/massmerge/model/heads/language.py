"""Language heads: the family's own class of language model, around the modules of the second pass, for one selected set.

An output layer that is tied to the embeddings stays tied: it is the base's table with the set's update. One of its own is
stored by each task that has it, or once for the base, and like all tensors without factors the mean over the set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from massmerge.bundle.layout import BASE, head_folder, task_folder
from massmerge.checkpoints.backbone import language_class, split
from massmerge.checkpoints.pretrained import pretrained_generation
from massmerge.checkpoints.skeleton import Skeleton, build
from massmerge.errors import InputError
from massmerge.io.tensor_file import TensorInfo, read_header, read_tensor
from massmerge.io.untrusted import GENERATION_CONFIG
from massmerge.model.second_pass import SecondPass, SetChanges
from massmerge.model.second_pass.modules import PerSegment, SubspaceLinear
from massmerge.model.trees import replace_module, shared_copy


class LanguageShell:
    """The family's class of language model without its backbone.

    Args:
        base: the backbone that it will be put around, or one of the same class.

    Raises:
        InputError: the base is no model that generates.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        name = language_class(base.config)
        if name is None:
            raise InputError(
                f"a {type(base).__name__} generates no text. That takes an encoder-decoder such as T5, or a decoder such as "
                "Llama. Use `predict`."
            )
        skeleton, ours = build(base.config, name), Skeleton(base)
        inside = skeleton.submodule(type(base)) or ""
        parts = split(skeleton, ours)
        self.own = parts.head
        """Names of the tensors that the backbone does not have."""
        self.tied = {
            alias: parts.backbone[slot.name]
            for slot in skeleton.slots.values()
            if slot.name in parts.backbone
            for alias in (slot.name, *slot.aliases)
            if alias.removeprefix(inside) not in ours.canonical
        }
        """Tied output layers: their weights' names, and the base's name of the tensor that they read."""
        # The backbone stands in one place, or (T5) each of its parts does.
        self._places = {inside.rstrip("."): ""} if inside else {name: name for name, _ in base.named_children()}
        self._model = skeleton.model.eval()
        for path in self._places:
            replace_module(self._model, path, nn.Identity())

    def defaults(self, bundle: Path) -> GenerationConfig:
        """How a bundle's base generates: as its `generation_config.json` says, else as its configuration does."""
        said = (bundle / BASE / GENERATION_CONFIG).is_file()
        return pretrained_generation(bundle / BASE) if said else self._model.generation_config

    def around(
        self, backbone: nn.Module, heads: dict[str, Tensor], tie: Callable[[nn.Module, str], nn.Module]
    ) -> PreTrainedModel:
        """The language model.

        Args:
            backbone: what it is put around.
            heads: output layers that are stored, by name.
            tie: gives the layer that reads the named tensor of the base in place of a tied one.
        """
        missing = [name for name in self.own if name not in heads]
        if missing:
            raise InputError(
                f"the bundle holds no {', '.join(missing)}, which turns features into words. Merge again, with a base or "
                "experts that have it."
            )
        model = shared_copy(self._model)
        for path, part in self._places.items():
            replace_module(model, path, backbone.get_submodule(part))
        for name, tensor in heads.items():
            _assign(model, name, tensor)
        for name, tensor_name in self.tied.items():
            if name not in heads:
                owner = name.removesuffix(".weight")
                replace_module(model, owner, tie(model.get_submodule(owner), tensor_name))
        return model

    def stored(self, bundle: Path, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Output layers that a bundle stores for a set: the mean over its tasks, or the base's where no task has any."""
        found = _heads([task_folder(bundle, task) for task in tasks]) or _heads([bundle / BASE])
        names = [n for n in (*self.own, *self.tied) if any(n in header for header in found)]
        return {n: _mean([read_tensor(h[n]).float() for h in found if n in h]) for n in names}

    def kept_apart(self, bundle: Path, tasks: Sequence[str]) -> set[str]:
        """Names of the output layers that tasks store for themselves."""
        headers = _heads([task_folder(bundle, task) for task in tasks])
        return {n for n in (*self.own, *self.tied) if any(n in header for header in headers)}


class LanguageModels:
    """Makes the language model of each selected set, once.

    Args:
        base: the base.
        second_pass: its modules with the updates of sets.
        bundle: the bundle's folder, for heads that are stored.
        tasks: names of the tasks, in order.
    """

    def __init__(self, base: PreTrainedModel, second_pass: SecondPass, bundle: Path, tasks: list[str]) -> None:
        self._base, self._second_pass, self._bundle, self._tasks = base, second_pass, bundle, tasks
        self._shell = LanguageShell(base)
        self._lock = threading.Lock()

    @property
    def defaults(self) -> GenerationConfig:
        """How the base generates where no option says otherwise."""
        return self._shell.defaults(self._bundle)

    def of(self, changes: SetChanges) -> PreTrainedModel:
        """The language model of a set; it must run inside `running`."""
        with self._lock:
            found = changes.modules.get(id(self))
            if found is None:
                found = changes.modules[id(self)] = self._make(changes)
        assert isinstance(found, PreTrainedModel)
        return found

    @cached_property
    def mixed(self) -> PreTrainedModel | None:
        """The language model of all sets together: rows of a batch have each their own; it must run inside `running`.

        None for encoder-decoders, and where a part of the base cannot be divided by inputs.
        """
        base, second = self._base, self._second_pass
        if getattr(base.config, "is_encoder_decoder", False) or not second.divided:
            return None
        apart = self._shell.kept_apart(self._bundle, self._tasks)
        shared = {
            name: tensor.to(base.device, base.dtype) for name, tensor in self._shell.stored(self._bundle, []).items()
        }
        empty = {name: torch.empty(0, device="meta") for name in apart}
        model = self._shell.around(second.model, {**shared, **empty}, self._tied_layer)
        for owner in {name.rpartition(".")[0] for name in apart}:
            inside = {name for name in apart if name.rpartition(".")[0] == owner}
            layer = PerSegment(model.get_submodule(owner), partial(self._own_layer, names=inside))
            replace_module(model, owner, layer)
        return model

    def _own_layer(self, layer: nn.Module, changes: SetChanges, names: set[str]) -> nn.Module:
        """An output layer as one set has it."""
        heads = self._heads_of(changes)
        copy = shared_copy(layer)
        for name in names:
            if name in heads:
                _assign(copy, name.rpartition(".")[2], heads[name])
            else:  # another set stores its own
                copy = self._tied_layer(copy, self._shell.tied[name])
        return copy

    def _heads_of(self, changes: SetChanges) -> dict[str, Tensor]:
        heads = self._shell.stored(self._bundle, [self._tasks[task] for task in changes.tasks])
        return {name: tensor.to(self._base.device, self._base.dtype) for name, tensor in heads.items()}

    def _make(self, changes: SetChanges) -> PreTrainedModel:
        return self._shell.around(self._second_pass.of(changes), self._heads_of(changes), self._tied_layer)

    def _tied_layer(self, layer: nn.Module, tensor: str) -> nn.Module:
        """An output layer that reads the base's table, with the update of the running set."""
        _assign(layer, "weight", self._base.get_parameter(tensor))
        return SubspaceLinear(layer, tensor, "", transposed=False)


def dense_language_model(
    bundle: Path, backbone: PreTrainedModel, task: str
) -> tuple[PreTrainedModel, GenerationConfig]:
    """An expert that writes, around a dense backbone that holds its weights; and how its bundle's base generates."""

    def tie(layer: nn.Module, tensor: str) -> nn.Module:
        """A layer with the backbone's tensor as its weight."""
        _assign(layer, "weight", backbone.get_parameter(tensor))
        return layer

    shell = LanguageShell(backbone)
    return shell.around(backbone, shell.stored(bundle, [task]), tie), shell.defaults(bundle)


def _heads(folders: list[Path]) -> list[dict[str, TensorInfo]]:
    """The tensors of heads that are classes of transformers."""
    found = [f / "model.safetensors" for f in map(head_folder, folders) if (f / "config.json").is_file()]
    return [read_header(path) for path in found]


def _mean(tensors: list[Tensor]) -> Tensor:
    """The mean; one tensor is not copied, for output layers are large."""
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors).mean(0)


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor in the place of one that has only a shape."""
    path, _, own = name.rpartition(".")
    owner = model.get_submodule(path)
    if own in owner._buffers:
        owner._buffers[own] = value
    else:
        owner._parameters[own] = nn.Parameter(value, requires_grad=False)
