"""A loaded static merge: one model for all tasks, or one for each, that answers as a bundle does but routes nothing."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from massmerge.bundle.download import find_bundle
from massmerge.bundle.layout import HEAD, HEADS, LABELS, STATIC_RECIPE, head_folder
from massmerge.bundle.manifest import find_damage, read_manifest
from massmerge.bundle.problem_types import read_labels, read_problem
from massmerge.bundle.reader import opened_in_words
from massmerge.checkpoints.backbone import BACKBONE, auto_class
from massmerge.checkpoints.pretrained import model_class, pretrained_model
from massmerge.checkpoints.stores import open_folder
from massmerge.errors import InputError, listing
from massmerge.io.placement import Placement
from massmerge.io.tensor_file import read_tensor
from massmerge.model.base import ready_to_run
from massmerge.model.core import Core
from massmerge.model.heads.classify import Head, Shells, load_head
from massmerge.model.inputs import InputReader
from massmerge.model.prompts import Writing
from massmerge.model.unrouted import OneBackbone
from massmerge.recipe import ProblemType, Recipe


class StaticFolder:
    """What `mass merge` wrote with a static method, not loaded.

    Args:
        path: the folder.

    Raises:
        InputError: it is no static merge, or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = find_bundle(path)
        manifest = read_manifest(self.path)
        if manifest.get("method") == "mass":
            raise InputError(f"{path}: a bundle. Load it with massmerge.load({str(path)!r}).")
        if faults := find_damage(self.path, manifest):
            raise InputError(f"{path}: damaged:{listing(faults)}\n  Merge again, or copy it again.")
        recipe = Recipe.load(self.path / STATIC_RECIPE)
        self.method: str = manifest["method"]
        self.tasks: list[str] = manifest["tasks"]
        self.shared_labels = recipe.shared_labels
        self.needs_task = recipe.merge.keeps_tasks
        self.nbytes: int = manifest["needed_bytes"]
        self.base_bytes: int = manifest["base"]["bytes"]
        self._class: str = manifest["base"]["class"]
        self.model = self.path / self.tasks[0] if self.needs_task else self.path
        """The folder of the checkpoint; of several the first."""

    @property
    def writes(self) -> bool:
        """Whether its tasks answer with text."""
        return auto_class(self._class) != BACKBONE

    @property
    def model_class(self) -> type[Any]:
        """What opens the checkpoint."""
        return model_class(self._class) if self.writes else AutoModel

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        kinds = [info.dtype for info in open_folder(self.model).infos.values()]
        return next((kind for kind in kinds if kind.is_floating_point), torch.float32)

    @property
    def head_bytes(self) -> int:
        """Bytes of heads and label names."""
        files = [f for task in self.tasks for part in (HEAD, LABELS) for f in self._files(self.home(task) / part)]
        return sum(file.stat().st_size for file in files)

    @staticmethod
    def _files(path: Path) -> list[Path]:
        return [path] if path.is_file() else sorted(path.glob("*"))

    @property
    def problems(self) -> dict[str, ProblemType]:
        """What the outputs of each task's head mean."""
        return {task: read_problem(head_folder(self.home(task)), len(names)) for task, names in self.labels.items()}

    @property
    def takes_images(self) -> bool:
        """Whether it is an image model."""
        return (self.model / "preprocessor_config.json").is_file()

    def home(self, task: str) -> Path:
        """The folder of a task's head and labels."""
        return self.path / task if self.needs_task else self.path / HEADS / task

    @cached_property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Label names of each task that has a head."""
        files = {task: self.home(task) / LABELS for task in self.tasks}
        return {t: read_labels(f) for t, f in files.items() if f.is_file()}


class StaticModel(OneBackbone):
    """What `mass merge` wrote with a static method.

    Args:
        path: the folder.
        device: where to run, as in `load`.
        dtype: the type to run in, as in `load`.

    Raises:
        InputError: it is no static merge, is damaged, or a task has no head.
    """

    def __init__(self, path: str | Path, *, device: str = "auto", dtype: str = "auto") -> None:
        folder = StaticFolder(path)
        self.path, self.method, self.needs_task = folder.path, folder.method, folder.needs_task
        with opened_in_words(folder.path):
            core = _open(folder, Placement.choose(device, dtype, folder.dtype))
        super().__init__(core, folder.nbytes)
        self._loaded: str | None = folder.tasks[0]

    def _forward(self, batch: dict[str, Tensor], task: str | None) -> Any:
        self._turn_to(task)
        return super()._forward(batch, task)

    def _generate(self, writing: Writing, task: str | None, batch: dict[str, Tensor]) -> list[list[int]]:
        self._refuse_task(task)
        self._turn_to(task)
        return super()._generate(writing, task, batch)

    def _turn_to(self, task: str | None) -> None:
        """Give the model a task's own weights, where each task has some."""
        if self.needs_task and task is not None and task != self._loaded:
            self.load_weights(_weights(self.path / task))
            self._loaded = task


def _open(folder: StaticFolder, place: Placement) -> Core:
    model = pretrained_model(folder.model_class, folder.model, place.storage)
    model = ready_to_run(model, set(open_folder(folder.model).infos)).to(place.device)
    reader = InputReader(folder.model, model.config, image=model.main_input_name == "pixel_values")
    if folder.writes:
        return Core(model, folder.tasks, {}, {}, reader, folder.shared_labels)
    shells: Shells = {}
    found = {task: load_head(head_folder(folder.home(task)), model, shells) for task in folder.tasks}
    heads: dict[str, Head] = {task: head for task, head in found.items() if head is not None}
    without = [task for task in folder.tasks if task not in heads]
    if without:
        raise InputError(f"{', '.join(without)}: no head, so there is no label to answer. Use AutoModel instead.")
    return Core(model, folder.tasks, folder.labels, heads, reader, folder.shared_labels)


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: read_tensor(info) for name, info in open_folder(folder).infos.items()}
