"""A loaded static merge: one model for all tasks, or one for each, that answers as a bundle does but routes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from massmerge.answering import Answering
from massmerge.answers import Prediction
from massmerge.assemble_static import HEADS
from massmerge.base_model import ready_to_run
from massmerge.bundle import find_damage, read_manifest
from massmerge.errors import InputError, listing
from massmerge.heads.runtime import Head, load_head
from massmerge.inputs import InputReader
from massmerge.recipe import Recipe
from massmerge.tensorfile import read_header, read_tensor


class StaticModel:
    """What `mass merge` wrote with a static method.

    Args:
        path: the folder.

    Raises:
        InputError: it is no static merge, is damaged, or a task has no head.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        manifest = read_manifest(self.path)
        if manifest.get("method") == "mass":
            raise InputError(f"{path}: a bundle. Load it with massmerge.load({str(path)!r}).")
        if faults := find_damage(self.path, manifest):
            raise InputError(f"{path}: damaged:{listing(faults)}\n  Merge again, or copy it again.")
        recipe = Recipe.load(self.path / "mass_recipe.yaml")
        self.method: str = manifest["method"]
        self.needs_task = recipe.merge.keeps_tasks
        """Whether every task has a model of its own, so that the task must be told."""
        self.nbytes: int = manifest["needed_bytes"]
        self._answering = self._open(recipe, manifest["tasks"])
        self._loaded = manifest["tasks"][0] if self.needs_task else None

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return self._answering.tasks

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Label names of each task."""
        return dict(self._answering.labels)

    @property
    def shared_labels(self) -> list[list[str]]:
        """Groups of `task/label` that mean the same thing, as the recipe declares them."""
        return self._answering.shared_labels

    @property
    def takes_images(self) -> bool:
        """Whether inputs are images; text otherwise."""
        return self._answering.reader.image

    @property
    def backbone(self) -> PreTrainedModel:
        """The model that runs; of a method that keeps the tasks apart, the one of the task that was asked last."""
        return self._answering.base

    def predict(
        self, inputs: Iterable[Any], *, task: str | None = None, top: int = 3, batch_size: int = 32
    ) -> list[Prediction]:
        """Answer inputs.

        Args:
            inputs: text, pairs of texts, images, paths, or ready tensors.
            task: whose head answers; by default the head with the largest logit.
            top: how many answers to give, the best included.
            batch_size: how many inputs run at once.

        Raises:
            InputError: an unknown task, an input that cannot be read, or a method that must be told the task.
        """
        if task is not None and task not in self.tasks:
            raise InputError(f"no task {task!r}. There are {', '.join(self.tasks)}.")
        if task is None and self.needs_task:
            raise InputError(f"{self.path}: {self.method} keeps a model for each task. Name the task of the inputs.")
        allowed = self.tasks if task is None else task
        predictions: list[Prediction] = []
        for batch in self._answering.batches([inputs] if isinstance(inputs, str) else inputs, batch_size):
            count = len(next(iter(batch.values())))
            predictions += self._answering.answers(self._forward(batch, task), batch, [allowed] * count, top=top)
        return predictions

    def outcomes(
        self, inputs: Sequence[Any], tasks: Sequence[str], *, batch_size: int = 32
    ) -> list[tuple[Prediction, Prediction]]:
        """For each input the answer with the head unknown, and the answer with its task told, from one forward pass.

        A method that must be told the task has no answer without it.
        """
        pairs: list[tuple[Prediction, Prediction]] = [(Prediction(None), Prediction(None))] * len(inputs)
        groups = [tasks] if not self.needs_task else [[task] for task in dict.fromkeys(tasks)]
        for group in groups:
            places = [i for i, task in enumerate(tasks) if task in group]
            task = group[0] if self.needs_task else None
            found = self._pairs([inputs[i] for i in places], [tasks[i] for i in places], task, batch_size)
            for place, pair in zip(places, found, strict=True):
                pairs[place] = pair
        return pairs

    def _pairs(
        self, inputs: Sequence[Any], tasks: Sequence[str], task: str | None, batch_size: int
    ) -> Iterator[tuple[Prediction, Prediction]]:
        at = 0
        for batch in self._answering.batches(inputs, batch_size):
            count = len(next(iter(batch.values())))
            output = self._forward(batch, task)
            told = self._answering.answers(output, batch, tasks[at : at + count])
            if self.needs_task:
                free = [Prediction(None)] * count
            else:
                free = self._answering.answers(output, batch, [self.tasks] * count)
            yield from zip(free, told, strict=True)
            at += count

    @torch.inference_mode()
    def _forward(self, batch: dict[str, Tensor], task: str | None) -> Any:
        if task != self._loaded and self.needs_task:
            assert task is not None
            self.load_weights(_weights(self.path / task))
            self._loaded = task
        return self.backbone(**self._answering.call(batch))

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Give the backbone other weights; tensors that are not named stay as they are."""
        strange = self.backbone.load_state_dict(dict(weights), strict=False).unexpected_keys
        if strange:
            raise InputError(f"{self.path}: the backbone has no place for {', '.join(strange)}.")

    def _open(self, recipe: Recipe, tasks: list[str]) -> Answering:
        folder = self.path / tasks[0] if self.needs_task else self.path
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        model = ready_to_run(model, set(read_header(folder / "model.safetensors")))
        homes = {task: self.path / task if self.needs_task else self.path / HEADS / task for task in tasks}
        found = {task: load_head(home / "head", model) for task, home in homes.items()}
        heads: dict[str, Head] = {task: head for task, head in found.items() if head is not None}
        without = [task for task in tasks if task not in heads]
        if without:
            raise InputError(f"{', '.join(without)}: no head, so there is no label to answer. Use AutoModel instead.")
        labels = {task: tuple(json.loads((homes[task] / "labels.json").read_text(encoding="utf-8"))) for task in tasks}
        reader = InputReader(folder, model.config, image=model.main_input_name == "pixel_values")
        return Answering(model, labels, recipe.shared_labels, heads, reader)


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: read_tensor(info).float() for name, info in read_header(folder / "model.safetensors").items()}
