"""A loaded static merge: one model for all tasks, or one for each, that answers as a bundle does but routes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from massmerge.answering import Answerer, Answering
from massmerge.answers import Prediction
from massmerge.assemble_static import HEADS
from massmerge.base_model import ready_to_run
from massmerge.bundle import find_damage, read_manifest
from massmerge.checkpoints.pretrained import pretrained_model
from massmerge.errors import InputError, listing
from massmerge.heads.runtime import Head, load_head
from massmerge.inputs import InputReader
from massmerge.parallel import parts_of, run_parts
from massmerge.recipe import Recipe
from massmerge.routed import several
from massmerge.tensorfile import read_header, read_tensor
from massmerge.trees import join_rows, take_rows


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
        """Answer inputs.

        Args:
            inputs: what a loaded bundle takes: text, pairs of texts, images, paths, ready tensors.
            task: whose head answers; by default the head with the largest logit.
            top: how many answers to give, the best included.
            batch_size: how many inputs run at once.

        Raises:
            InputError: an unknown task, an input that cannot be read, or a method that must be told the task.
        """
        if task is not None:
            self.refuse_unknown([task])
        elif self.needs_task:
            raise InputError("this method keeps a model for each task. Name the task of the inputs.")
        allowed = self.tasks if task is None else task
        predictions: list[Prediction] = []
        for batch in self.parts.batches(several(inputs), batch_size):
            count = len(next(iter(batch.values())))
            predictions += self.parts.answers(self._forward(batch, task), batch, [allowed] * count, top=top)
        return predictions

    def outcomes(
        self, inputs: Sequence[Any], tasks: Sequence[str], *, batch_size: int = 32
    ) -> list[tuple[Prediction, Prediction]]:
        """For each input the answer with the head unknown, and the answer with its task told, from one forward pass.

        A method that must be told the task has no answer without it.
        """
        pairs: list[tuple[Prediction, Prediction]] = [(Prediction(None), Prediction(None))] * len(inputs)
        groups = [[task] for task in dict.fromkeys(tasks)] if self.needs_task else [list(tasks)]
        for group in groups:
            places = [i for i, task in enumerate(tasks) if task in group]
            found = self._pairs([inputs[i] for i in places], [tasks[i] for i in places], batch_size)
            for place, pair in zip(places, found, strict=True):
                pairs[place] = pair
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


class StaticModel(OneBackbone):
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
        super().__init__(self._open(recipe, manifest["tasks"]), manifest["needed_bytes"])
        self._loaded: str | None = manifest["tasks"][0]

    def _forward(self, batch: dict[str, Tensor], task: str | None) -> Any:
        if self.needs_task and task is not None and task != self._loaded:
            self.load_weights(_weights(self.path / task))
            self._loaded = task
        return super()._forward(batch, task)

    def _open(self, recipe: Recipe, tasks: list[str]) -> Answering:
        folder = self.path / tasks[0] if self.needs_task else self.path
        model = pretrained_model(AutoModel, folder)
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
