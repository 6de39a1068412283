"""Models that answer without a router of their own: all tasks' heads on one backbone, or texts from one language model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from massmerge.errors import InputError
from massmerge.model.answers import Generation, Prediction, answered
from massmerge.model.core import Answering, Core
from massmerge.model.inputs import Row, several
from massmerge.model.prompts import Writing
from massmerge.model.speed.parallel import parts_of, run_parts
from massmerge.model.trees import join_rows, take_rows


class Answerer(Answering):
    """What answers with the tasks' own heads, or writes: a static merge, a routed peer."""

    def generate(
        self, prompts: Any, *, task: str | None = None, batch_size: int = 8, **options: Any
    ) -> list[Generation]:
        """Write an answer to each prompt, where the tasks' experts write. Its texts name no task.

        Args:
            prompts: texts, or what else a loaded bundle takes.
            task: the task of the prompts; only methods that keep a model for each task must be told.
            batch_size: how many prompts run at once.
            options: those of transformers' `generate`, such as `max_new_tokens` (64 by default) and `num_beams`.

        Raises:
            InputError: tasks that answer with labels, an unknown task, a prompt that cannot be read, or no such option.
        """
        return list(self.generate_many(several(prompts), task=task, batch_size=batch_size, **options))

    def generate_many(
        self,
        prompts: Iterable[Any],
        *,
        task: str | None = None,
        batch_size: int = 8,
        on_error: Literal["raise", "row"] = "raise",
        **options: Any,
    ) -> Iterator[Generation]:
        """As `generate`, one batch at a time; with `row`, what cannot be read has its error in its row."""
        if not self.writes:
            raise InputError(f"{', '.join(self.tasks)}: answers with labels, not with text. Use `predict`.")
        self.core.positions(task)
        base = self.core.base
        writing = Writing(self.core.reader, base.config, base.generation_config, options)

        def write(batch: dict[str, Tensor]) -> list[list[int]]:
            """The tokens of a batch."""
            return self._generate(writing, task, self.core.placement.batch(batch))

        for rows in self.core.rows(prompts, batch_size, on_error, writing.read):
            yield from answered(rows, lambda good: writing.texts(good, write), Generation)

    def _generate(self, writing: Writing, task: str | None, batch: dict[str, Tensor]) -> list[list[int]]:
        """New tokens for a batch of prompts."""
        return writing.generate(self.core.base, batch)

    def _text_outcomes(
        self, inputs: Sequence[Any], tasks: Sequence[str], batch_size: int, options: dict[str, Any]
    ) -> list[tuple[Prediction, Prediction]]:
        """The text for each input, as the answer without and with its task: there is no head to be told."""
        found = self.generate_many(inputs, task=tasks[0] if tasks else None, batch_size=batch_size, **options)
        return [(answer, answer) for answer in (Prediction(None, one.text) for one in found)]


class OneBackbone(Answerer):
    """A backbone with the heads of all tasks, which answers and routes nothing.

    Args:
        core: the backbone, the heads, and what reads inputs for them.
        nbytes: of all tensors that answers need, heads apart.
    """

    needs_task = False
    """Whether every task has a model of its own, so that the task must be told."""

    def __init__(self, core: Core, nbytes: int) -> None:
        super().__init__(core)
        self.nbytes = nbytes

    @property
    def backbone(self) -> PreTrainedModel:
        """The model that runs; of a method that keeps the tasks apart, the one of the task that was asked last."""
        return self.core.base

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

        def answer(good: list[Row]) -> list[Prediction]:
            """The answers of a batch."""
            batch = self.core.batch(good)
            return self.core.answers(self._forward(batch, task), batch, [allowed] * len(good), top=top)

        for rows in self.core.rows(inputs, batch_size, on_error):
            yield from answered(rows, answer, Prediction)

    def _refuse_task(self, task: str | None) -> None:
        """Refuse a task that is not there, or that is not named though it must be."""
        self.core.positions(task)
        if self.needs_task and task is None:
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
        for batch in self.core.batches(inputs, batch_size):
            count = len(next(iter(batch.values())))
            own = tasks[at : at + count]
            output = self._forward(batch, own[0])
            free = [Prediction(None)] * count
            if not self.needs_task:
                every = sum(map(len, self.labels.values()))  # so that the best label of each head is among them
                free = self.core.answers(output, batch, [self.tasks] * count, top=every)
            yield from zip(free, self.core.answers(output, batch, own), strict=True)
            at += count

    def _forward(self, batch: dict[str, Tensor], task: str | None) -> Any:
        """The backbone's output; `task` matters only where every task has a model of its own."""
        call, first = self.core.call(batch), next(iter(batch.values()))

        @torch.inference_mode()
        def run(rows: slice) -> Any:
            """The backbone's output for some rows."""
            return self.backbone(**take_rows(call, rows, len(first)))

        return join_rows(run_parts(run, parts_of(len(first), first.device)))
