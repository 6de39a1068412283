"""A loaded static merge: one model for all tasks, or one for each, that answers as a bundle does but routes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from massmerge.bundle.layout import HEAD, HEADS, LABELS, STATIC_RECIPE, head_folder
from massmerge.bundle.manifest import find_damage, read_manifest
from massmerge.bundle.problem_types import read_problem
from massmerge.checkpoints.backbone import BACKBONE, auto_class
from massmerge.checkpoints.pretrained import model_class, pretrained_model
from massmerge.errors import InputError, listing
from massmerge.io.tensor_file import read_header, read_tensor
from massmerge.model.answering import Answerer, Answering
from massmerge.model.answers import Prediction
from massmerge.model.base import ready_to_run
from massmerge.model.heads.classify import Head, load_head
from massmerge.model.inputs import InputReader
from massmerge.model.prompts import Writing
from massmerge.model.routed import several
from massmerge.model.speed.parallel import parts_of, run_parts
from massmerge.model.trees import join_rows, take_rows
from massmerge.recipe import ProblemType, Recipe


class OneBackbone(Answerer):
    """A backbone with the heads of all tasks, which answers and routes nothing.

    Args:
        answering: the backbone, the heads, and what reads inputs for them.
        nbytes: of all tensors that answers need, heads apart.
    """

    needs_task = False
    """Whether every task has a model of its own, so that the task must be told."""

    def __init__(self, answering: Answering, nbytes: int) -> None:
        super().__init__(answering)
        self.nbytes = nbytes

    @property
    def backbone(self) -> PreTrainedModel:
        """The model that runs; of a method that keeps the tasks apart, the one of the task that was asked last."""
        return self.parts.base

    def predict(self, inputs: Any, *, task: str | None = None, top: int = 3, batch_size: int = 32) -> list[Prediction]:
        """Answer inputs with labels.

        Args:
            inputs: what a loaded bundle takes: text, pairs of texts, images, paths, ready tensors.
            task: whose head answers; by default the head with the largest logit.
            top: how many answers to give, the best included.
            batch_size: how many inputs run at once.

        Raises:
            InputError: an unknown task, an input that cannot be read, a method that must be told the task, or tasks that
                write.
        """
        return list(self.stream(several(inputs), task=task, top=top, batch_size=batch_size))

    def stream(
        self,
        inputs: Iterable[Any],
        *,
        task: str | None = None,
        top: int = 3,
        batch_size: int = 32,
        on_error: Literal["raise", "row"] = "raise",
    ) -> Iterator[Prediction]:
        """As `predict`, one batch at a time; with `row`, what cannot be read has its error in its row."""
        if self.writes:
            raise InputError(f"{', '.join(self.tasks)}: no head, so there is no label to answer. Use `generate`.")
        self._refuse_task(task)
        allowed = self.tasks if task is None else task
        for batch, errors in self.parts.readable(inputs, batch_size, on_error):
            found: list[Prediction] = []
            if batch:
                chosen = [allowed] * errors.count(None)
                found = self.parts.answers(self._forward(batch, task), batch, chosen, top=top)
            answers = iter(found)
            for error in errors:
                yield next(answers) if error is None else Prediction(None, error=str(error))

    def _refuse_task(self, task: str | None) -> None:
        """Refuse a task that is not there, or that is not named though it must be."""
        if task is not None:
            self.refuse_unknown([task])
        elif self.needs_task:
            raise InputError("this method keeps a model for each task. Name the task of the inputs.")

    def outcomes(
        self, inputs: Sequence[Any], tasks: Sequence[str], *, batch_size: int = 32, **options: Any
    ) -> list[tuple[Prediction, Prediction]]:
        """For each input the answer with the head unknown, and the answer with its task told, from one forward pass.

        A method that must be told the task has no answer without it. Where tasks write, both are the same text, and the
        `options` are those of transformers' `generate`.
        """
        pairs: list[tuple[Prediction, Prediction]] = [(Prediction(None), Prediction(None))] * len(inputs)
        groups = [[task] for task in dict.fromkeys(tasks)] if self.needs_task else [list(tasks)]
        for group in groups:
            places = [i for i, task in enumerate(tasks) if task in group]
            given, named = [inputs[i] for i in places], [tasks[i] for i in places]
            found = (
                self._text_outcomes(given, named, batch_size, options)
                if self.writes
                else self._pairs(given, named, batch_size)
            )
            for place, pair in zip(places, found, strict=True):
                pairs[place] = (Prediction(None), pair[1]) if self.needs_task else pair
        return pairs

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Give the backbone other weights; tensors that are not named stay as they are."""
        strange = self.backbone.load_state_dict(dict(weights), strict=False).unexpected_keys
        if strange:
            raise InputError(f"the backbone has no place for {', '.join(strange)}.")

    def _pairs(
        self, inputs: Sequence[Any], tasks: Sequence[str], batch_size: int
    ) -> Iterator[tuple[Prediction, Prediction]]:
        at = 0
        for batch in self.parts.batches(inputs, batch_size):
            count = len(next(iter(batch.values())))
            own = tasks[at : at + count]
            output = self._forward(batch, own[0])
            free = [Prediction(None)] * count
            if not self.needs_task:
                free = self.parts.answers(output, batch, [self.tasks] * count)
            yield from zip(free, self.parts.answers(output, batch, own), strict=True)
            at += count

    def _forward(self, batch: dict[str, Tensor], task: str | None) -> Any:
        """The backbone's output; `task` matters only where every task has a model of its own."""
        call, first = self.parts.call(batch), next(iter(batch.values()))

        @torch.inference_mode()
        def run(rows: slice) -> Any:
            return self.backbone(**take_rows(call, rows, len(first)))

        return join_rows(run_parts(run, parts_of(len(first), first.device)))


class StaticFolder:
    """What `mass merge` wrote with a static method, not loaded.

    Args:
        path: the folder.

    Raises:
        InputError: it is no static merge, or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
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
        return {t: tuple(json.loads(f.read_text(encoding="utf-8"))) for t, f in files.items() if f.is_file()}


class StaticModel(OneBackbone):
    """What `mass merge` wrote with a static method.

    Args:
        path: the folder.

    Raises:
        InputError: it is no static merge, is damaged, or a task has no head.
    """

    def __init__(self, path: str | Path) -> None:
        folder = StaticFolder(path)
        self.path, self.method, self.needs_task = folder.path, folder.method, folder.needs_task
        super().__init__(_open(folder), folder.nbytes)
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


def _open(folder: StaticFolder) -> Answering:
    model = pretrained_model(folder.model_class, folder.model)
    model = ready_to_run(model, set(read_header(folder.model / "model.safetensors")))
    reader = InputReader(folder.model, model.config, image=model.main_input_name == "pixel_values")
    if folder.writes:
        return Answering(model, dict.fromkeys(folder.tasks, ()), folder.shared_labels, {}, reader)
    found = {task: load_head(head_folder(folder.home(task)), model) for task in folder.tasks}
    heads: dict[str, Head] = {task: head for task, head in found.items() if head is not None}
    without = [task for task in folder.tasks if task not in heads]
    if without:
        raise InputError(f"{', '.join(without)}: no head, so there is no label to answer. Use AutoModel instead.")
    return Answering(model, folder.labels, folder.shared_labels, heads, reader)


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: read_tensor(info).float() for name, info in read_header(folder / "model.safetensors").items()}
