"""What every method that is built from a recipe's sources answers with: the base, the reader of inputs, the heads."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from massmerge.answers import Prediction, Routing, make_prediction
from massmerge.base_model import dense_base
from massmerge.errors import InputError, problems_error
from massmerge.heads import write_head
from massmerge.heads.runtime import Head, ShellHead, load_head
from massmerge.inputs import InputReader
from massmerge.prepare import Prepared
from massmerge.recipe import AnswerOptions, ProblemType
from massmerge.routing.sites import probe_inputs
from massmerge.runtime import with_decoder_start
from massmerge.subspace.install import PROBE_BATCH, Observed, observe
from massmerge.trees import take_rows


@dataclass(frozen=True)
class Answering:
    """The base with the tasks' heads, and what reads inputs for it."""

    base: PreTrainedModel
    """In float32; tensors that only tasks have are zero."""
    labels: dict[str, tuple[str, ...]]
    """Of each task, in order."""
    shared_labels: list[list[str]]
    heads: dict[str, Head]
    reader: InputReader

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return list(self.labels)

    @property
    def problems(self) -> dict[str, ProblemType]:
        """What the outputs of each task's head mean."""
        return {task: head.problem_type for task, head in self.heads.items()}

    def batches(self, inputs: Iterable[Any], size: int) -> Iterator[dict[str, Tensor]]:
        """Inputs as batches of tensors.

        Raises:
            InputError: one of them cannot be read.
        """
        if size < 1:
            raise InputError("batch_size must be at least 1.")
        items = iter(inputs)
        while chunk := list(islice(items, size)):
            yield self.reader.batch([self.reader.row(item) for item in chunk])

    def call(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The keyword arguments with which the tasks' models would call the backbone."""
        shell = next((head for head in self.heads.values() if isinstance(head, ShellHead)), None)
        return shell.backbone_call(batch, self.base) if shell else with_decoder_start(batch, self.base)

    def observed(self) -> Observed:
        """What a forward pass shows of the base's modules."""
        return observe(self.base, self.call(probe_inputs(self.base, PROBE_BATCH)))

    def answers(
        self,
        output: Any,
        batch: dict[str, Tensor],
        tasks: Sequence[str | Sequence[str]],
        *,
        routings: Sequence[Routing] | None = None,
        top: int = 3,
    ) -> list[Prediction]:
        """The best labels for each row.

        Args:
            output: the backbone's.
            batch: what it was the output of.
            tasks: whose head answers, for each row; of several the head with the largest logit.
            routings: what the predictions say of how that task was found.
            top: how many labels.
        """
        chosen = [(one,) if isinstance(one, str) else tuple(one) for one in tasks]
        logits: list[dict[str, Tensor]] = [{} for _ in chosen]
        for task, head in self.heads.items():
            rows = [row for row, names in enumerate(chosen) if task in names]
            if not rows:
                continue
            index = torch.tensor(rows)
            found = head(take_rows(output, index, len(chosen)), {k: v[index] for k, v in batch.items()})
            for row, values in zip(rows, found, strict=True):
                logits[row][task] = values
        known: Sequence[Routing | None] = routings or [None] * len(logits)
        return [
            make_prediction(own, self.labels, self.problems, dict.fromkeys(own, 1.0), AnswerOptions(), top, routing)
            for own, routing in zip(logits, known, strict=True)
        ]


class Answerer:
    """What answers with the tasks' own heads: a static merge, a routed peer."""

    def __init__(self, parts: Answering) -> None:
        self.parts = parts

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return self.parts.tasks

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Label names of each task."""
        return self.parts.labels

    @property
    def problems(self) -> dict[str, ProblemType]:
        """What the outputs of each task's head mean, in Hugging Face's words."""
        return self.parts.problems

    @property
    def shared_labels(self) -> list[list[str]]:
        """Groups of `task/label` that mean the same thing, as the recipe declares them."""
        return self.parts.shared_labels

    @property
    def takes_images(self) -> bool:
        """Whether inputs are images; text otherwise."""
        return self.parts.reader.image

    def refuse_unknown(self, tasks: Iterable[str]) -> None:
        """Raise an error if there is no task of such a name."""
        unknown = sorted(set(tasks) - set(self.tasks))
        if unknown:
            raise InputError(f"no task {', '.join(map(repr, unknown))}. There are {', '.join(self.tasks)}.")


def open_answering(prepared: Prepared) -> Answering:
    """The base, reader and heads of a recipe's sources.

    Raises:
        InputError: the plan has errors, or a task has no head.
    """
    if prepared.plan.errors:
        raise problems_error(prepared.plan.errors)
    without = [task.name for task in prepared.recipe.tasks if prepared.heads[task.name].labels is None]
    if without:
        raise InputError(f"{', '.join(without)}: no head, so there is no label to answer. Give `head:` in the recipe.")
    touched = {name for expert in prepared.experts.values() for name in expert.names()}
    base = dense_base(prepared.base, touched)
    labels = {task.name: prepared.heads[task.name].labels or () for task in prepared.recipe.tasks}
    with TemporaryDirectory(prefix="mass-") as temporary:
        folder = Path(temporary)
        heads = {task: _head(prepared, task, folder, base) for task in labels}
        reader = _reader(prepared, folder / "processor", base)
    return Answering(base, labels, prepared.recipe.shared_labels, heads, reader)


def _head(prepared: Prepared, task: str, folder: Path, base: PreTrainedModel) -> Head:
    """A head as a bundle would hold it, read from there."""
    (folder / "tasks" / task).mkdir(parents=True)
    write_head(folder / "tasks" / task, prepared.heads[task])
    head = load_head(folder / "tasks" / task / "head", base)
    assert head is not None, "a task with labels has a head"
    return head


def _reader(prepared: Prepared, folder: Path, base: PreTrainedModel) -> InputReader:
    folder.mkdir()
    for name, path in prepared.processor.items():
        shutil.copyfile(path, folder / name)
    reader = InputReader(folder, base.config, image=base.main_input_name == "pixel_values")
    with suppress(InputError):  # told when an input comes that needs it; ready tensors do not
        _ = reader.processor
    return reader
