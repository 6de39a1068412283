"""What all routed peers share: inputs, batches, heads, votes, predictions, and the size of what is kept."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from massmerge.errors import InputError
from massmerge.evaluation.from_recipe import open_answering
from massmerge.io.placement import Placement
from massmerge.io.tensor_file import write_tensors
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.model.answers import Prediction, Routing
from massmerge.model.inputs import several
from massmerge.model.prompts import Writing
from massmerge.model.speed.parallel import parts_of, run_parts
from massmerge.model.trees import join_rows, shared_copy, take_rows
from massmerge.model.unrouted import Answerer
from massmerge.research.peers.task_deltas import TaskDeltas
from massmerge.research.peers.votes import Pass, running, shares

Inputs = Mapping[str, Sequence[Any]]
"""Some inputs of each task, without labels."""


class Peer(Answerer, ABC):
    """A method that mixes the experts' updates for each input.

    Args:
        prepared: a recipe's sources.
        name: of the method.
        options: what it was made with; kept beside its tensors.
    """

    site = "vote of the layers"

    def __init__(self, prepared: OpenedRecipe, name: str, options: Mapping[str, Any]) -> None:
        # In float32, as the published ones are: their layers multiply deltas that are.
        super().__init__(open_answering(prepared, Placement(prepared.place.device)))
        self.name, self.options = name, dict(options)
        self._output = {tensor.rpartition(".")[0] for tensor in prepared.base.output}
        self.deltas = TaskDeltas(prepared)

    @property
    def base(self) -> PreTrainedModel:
        """The dense part, which all tasks share."""
        return self.core.base

    @abstractmethod
    def forward(self, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
        """The backbone's output for a batch, and how much (batch, T) speaks for each task."""

    @abstractmethod
    def own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What the method keeps beside the dense part, by name."""

    # Answers

    def predict(self, inputs: Any, task: str | None = None, top: int = 3, batch_size: int = 32) -> list[Prediction]:
        """Answer inputs with labels.

        Args:
            inputs: what a loaded bundle takes: text, images, paths, ready tensors.
            task: whose head answers; the method chooses by default. The updates are mixed by the method in either case.
            top: how many answers to give, the best included.
            batch_size: how many inputs run at once.

        Raises:
            InputError: an unknown task, an input that cannot be read, or tasks that write.
        """
        if self.writes:
            raise InputError(f"{', '.join(self.tasks)}: no head, so there is no label to answer. Use `generate`.")
        self.core.positions(task)
        found: list[Prediction] = []
        for batch in self.core.batches(several(inputs), batch_size):
            output, speaks = self.forward(batch)
            routings = self._routings(speaks)
            heads = [r.selected[0] for r in routings] if task is None else [task] * len(routings)
            found += self.core.answers(output, batch, heads, routings=routings, top=top)
        return found

    def outcomes(
        self, inputs: Sequence[Any], tasks: Sequence[str], *, batch_size: int = 32, **options: Any
    ) -> list[tuple[Prediction, Prediction]]:
        """For each input the answer with the head that the method chooses and that with the head of the task named.

        Where tasks write, both are the same text.

        Args:
            inputs: what to answer.
            tasks: the true task of each.
            batch_size: how many inputs run at once; both answers come of one pass.
            options: of transformers' `generate`, where tasks write.
        """
        self.core.positions(sorted(set(tasks)) or None)
        if len(inputs) != len(tasks):
            raise InputError(f"{len(inputs)} inputs, but {len(tasks)} tasks. Name one for each.")
        if self.writes:
            return self._text_outcomes(inputs, tasks, batch_size, options)
        found: list[tuple[Prediction, Prediction]] = []
        for batch in self.core.batches(inputs, batch_size):
            output, speaks = self.forward(batch)
            routings = self._routings(speaks)
            chosen = [r.selected[0] for r in routings]
            given = tasks[len(found) : len(found) + len(chosen)]
            unknown, known = (self.core.answers(output, batch, h, routings=routings) for h in (chosen, given))
            found += zip(unknown, known, strict=True)
        return found

    def _routings(self, speaks: Tensor) -> list[Routing]:
        """The first of the tasks that most speaks for is chosen."""
        rows = speaks.tolist()
        best = speaks.argmax(1).tolist()
        return [
            Routing({}, dict(zip(self.tasks, row, strict=True)), [self.tasks[b]], self.site)
            for row, b in zip(rows, best, strict=True)
        ]

    # Size

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that answers need, heads apart, in the base's precision."""
        state = self.base.state_dict()
        shared = {f"shared.{name}": state[name] for name in self.deltas.slots if name in state}
        kept = {**shared, **dict(self.own_tensors())}
        counted = {n: t for n, t in kept.items() if not any(f".{layer}." in n for layer in self._output)}
        return {n: t.to(self.deltas.dtype) if t.is_floating_point() else t for n, t in counted.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of those tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def save(self, folder: Path) -> None:
        """Write the tensors and the options to a folder, so that its size on disk can be measured."""
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / "model.safetensors", self.tensors())
        about = {"method": self.name, "tasks": self.tasks, "options": self.options}
        (folder / "peer.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


class VotingPeer(Peer):
    """A peer whose layers route by themselves: one pass gives the output and the votes."""

    def __init__(self, prepared: OpenedRecipe, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(prepared, name, options)
        self.tree: PreTrainedModel = shared_copy(self.base)
        """The base's modules over the same tensors, with routed layers in their places."""

    def forward(self, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
        """The backbone's output for a batch, and which share (batch, T) of the layers is for each task."""
        call, first = self.core.call(batch), next(iter(batch.values()))
        count = len(first)

        @torch.inference_mode()
        def run(rows: slice) -> tuple[Any, Tensor]:
            """Output and shares of the tasks for some rows."""
            mask = batch.get("attention_mask")
            here = Pass(rows.stop - rows.start, None if mask is None else mask[rows])
            with running(here):
                output = self.tree(**take_rows(call, rows, count))
            return output, shares(here.votes, len(self.tasks))

        found = run_parts(run, parts_of(count, first.device))
        return join_rows([output for output, _ in found]), torch.cat([speaks for _, speaks in found])

    def _generate(self, writing: Writing, task: str | None, batch: dict[str, Tensor]) -> list[list[int]]:
        with running(Pass(len(batch["input_ids"]), batch["attention_mask"])):
            return writing.generate(self.tree, batch)


def refuse_missing_inputs(inputs: Inputs | None, tasks: Sequence[str]) -> Inputs:
    """The inputs, if there are some for every task.

    Raises:
        InputError: a task has none.
    """
    empty = [task for task in tasks if not (inputs or {}).get(task)]
    if empty or inputs is None:
        raise InputError(f"no inputs for {', '.join(empty)}. This method is fitted on unlabelled inputs of every task.")
    return inputs
