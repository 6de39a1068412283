"""What every method that is built from a recipe's sources answers with: the base, the reader of inputs, the heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from massmerge.errors import InputError
from massmerge.model.answers import Generation, Prediction, Routing, make_prediction
from massmerge.model.heads.classify import Head, ShellHead
from massmerge.model.inputs import InputReader, attempt
from massmerge.model.load import with_decoder_start
from massmerge.model.prompts import Writing
from massmerge.model.routed import several
from massmerge.model.second_pass.install import PROBE_BATCH, Observed, observe
from massmerge.model.trees import take_rows
from massmerge.recipe import AnswerOptions, ProblemType
from massmerge.routing.sites import probe_inputs


@dataclass(frozen=True)
class Answering:
    """The base with the tasks' heads, and what reads inputs for it."""

    base: PreTrainedModel
    """In float32; tensors that only tasks have are zero. Where tasks write, the language model."""
    labels: dict[str, tuple[str, ...]]
    """Of each task, in order; empty where tasks write."""
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

    @property
    def writes(self) -> bool:
        """Whether tasks answer with text."""
        return not self.heads

    def batches(self, inputs: Iterable[Any], size: int) -> Iterator[dict[str, Tensor]]:
        """Inputs as batches of tensors.

        Raises:
            InputError: one of them cannot be read.
        """
        return (batch for batch, _ in self.readable(inputs, size))

    def readable(
        self, inputs: Iterable[Any], size: int, on_error: Literal["raise", "row"] = "raise"
    ) -> Iterator[tuple[dict[str, Tensor], list[InputError | None]]]:
        """Inputs as batches of tensors, and for each what is wrong with it; an empty batch where none can be read."""
        if size < 1:
            raise InputError("batch_size must be at least 1.")
        items = iter(inputs)
        while chunk := list(islice(items, size)):
            found = [attempt(self.reader.row, item, on_error) for item in chunk]
            rows = [row for row in found if not isinstance(row, InputError)]
            yield self.reader.batch(rows) if rows else {}, [f if isinstance(f, InputError) else None for f in found]

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
    """What answers with the tasks' own heads, or writes: a static merge, a routed peer."""

    def __init__(self, parts: Answering) -> None:
        self.parts = parts

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
        if task is not None:
            self.refuse_unknown([task])
        base = self.parts.base
        writing = Writing(self.parts.reader, base.config, base.generation_config, options)
        yield from writing.stream(prompts, batch_size, partial(self._generate, writing, task), on_error)

    def _generate(self, writing: Writing, task: str | None, batch: dict[str, Tensor]) -> list[list[int]]:
        """New tokens for a batch of prompts."""
        return writing.generate(self.parts.base, batch)

    def _text_outcomes(
        self, inputs: Sequence[Any], tasks: Sequence[str], batch_size: int, options: dict[str, Any]
    ) -> list[tuple[Prediction, Prediction]]:
        """The text for each input, as the answer without and with its task: there is no head to be told."""
        found = self.generate_many(inputs, task=tasks[0] if tasks else None, batch_size=batch_size, **options)
        return [(answer, answer) for answer in (Prediction(None, one.text) for one in found)]

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return self.parts.tasks

    @property
    def writes(self) -> bool:
        """Whether tasks answer with text (`generate`)."""
        return self.parts.writes

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Label names of each task that has a head."""
        return {} if self.writes else self.parts.labels

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
