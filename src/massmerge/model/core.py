"""What every method answers with: the base, the reader of inputs, the heads, and batches from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from massmerge.bundle.damage import DamageWatch
from massmerge.checkpoints.backbone import language_class
from massmerge.errors import InputError
from massmerge.io.placement import Placement
from massmerge.model.answers import Prediction, Routing, make_prediction
from massmerge.model.heads.classify import Head, backbone_call
from massmerge.model.inputs import Batch, ChatRow, InputReader, Row, read_batches
from massmerge.model.second_pass.install import PROBE_BATCH, Observed, observe
from massmerge.model.trees import take_rows
from massmerge.recipe import AnswerOptions, ProblemType
from massmerge.routing.confidence import ConfidenceRule, data_free_rule
from massmerge.routing.sites import probe_inputs


@dataclass(frozen=True)
class LabelledHead:
    """A head with the names of its outputs."""

    head: Head
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Core:
    """The base with the tasks' heads, and what reads inputs for it."""

    base: PreTrainedModel
    """Tensors that only tasks have are zero in it. Of static merges and peers that write, the language model."""
    tasks: list[str]
    """Names of the tasks, in order."""
    labels: dict[str, tuple[str, ...]]
    """Of each task that has a head."""
    heads: dict[str, Head]
    reader: InputReader
    shared_labels: list[list[str]]
    """Groups of `task/label` that mean the same thing."""
    options: AnswerOptions = field(default_factory=AnswerOptions)
    """How heads are compared."""
    watch: DamageWatch | None = None
    """Sees to the files that tensors are mapped from."""
    rule: ConfidenceRule | None = None
    """How evidence becomes confidence; none for the rule that needs no data."""
    further: dict[str, dict[str, LabelledHead]] = field(default_factory=dict)
    """Further heads of tasks, by name."""

    @property
    def placement(self) -> Placement:
        """Where the base is, and in which type."""
        return Placement(self.base.device, self.base.dtype, self.base.dtype)

    @property
    def _rule(self) -> ConfidenceRule:
        return self.rule or data_free_rule(images=self.reader.image)

    @property
    def problems(self) -> dict[str, ProblemType]:
        """What the outputs of each task's head mean."""
        return {task: head.problem_type for task, head in self.heads.items()}

    @property
    def writes(self) -> bool:
        """Whether tasks answer with text: none has labels, and the base generates."""
        return not self.labels and language_class(self.base.config) is not None

    def positions(self, tasks: str | Iterable[str] | None) -> list[int]:
        """Positions of the named tasks, in order; of all by default.

        Raises:
            InputError: there is no such task, or none is named.
        """
        if tasks is None:
            return list(range(len(self.tasks)))
        names = [tasks] if isinstance(tasks, str) else list(tasks)
        unknown = [name for name in names if name not in self.tasks]
        if unknown or not names:
            wrong = f"no task {', '.join(map(repr, unknown))}" if unknown else "an empty list of tasks"
            raise InputError(f"{wrong}. Choose from {', '.join(self.tasks)}.")
        return [i for i, name in enumerate(self.tasks) if name in names]

    def refuse_damage(self) -> None:
        """Raise an error if the files that the tensors lie in are damaged, or have changed."""
        if self.watch is not None:
            self.watch.refuse_damage()

    # Batches

    def rows(
        self, inputs: Iterable[Any], size: int, on_error: str = "raise", read: Callable[[Any], Row] | None = None
    ) -> Iterator[list[Row | InputError]]:
        """Inputs as rows of tensors, so many at a time; with `row`, the error itself where one cannot be read."""
        for rows in read_batches(inputs, size, read or self.reader.row, on_error):
            yield rows
            self.refuse_damage()  # what was computed while a file changed is no answer

    def readable(
        self, inputs: Iterable[Any], size: int, read: Callable[[Any], Row] | None = None
    ) -> Iterator[list[Row]]:
        """Inputs as rows of tensors, so many at a time; one that cannot be read is an error."""
        for rows in self.rows(inputs, size, "raise", read):
            yield [row for row in rows if not isinstance(row, InputError)]

    def batches(self, inputs: Iterable[Any], size: int) -> Iterator[dict[str, Tensor]]:
        """Inputs as batches of tensors; one that cannot be read is an error."""
        return (self.batch(rows) for rows in self.readable(inputs, size))

    def batch(self, rows: list[Row], *, left: bool = False) -> dict[str, Tensor]:
        """Rows as one batch, where the backbone is; padded on the left if that is wanted."""
        self.refuse_damage()
        batch = self._placed(rows, left=left)
        talks = [(place, row.turn) for place, row in enumerate(rows) if isinstance(row, ChatRow)]
        if talks:
            batch.turns = [place for place, _ in talks], self._placed([turn for _, turn in talks])
        return batch

    def _placed(self, rows: list[Row], *, left: bool = False) -> Batch:
        return Batch(self.placement.batch(self.reader.batch(rows, left=left)))

    # Backbone and heads

    def call(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The keyword arguments with which the tasks' models would call the backbone."""
        return backbone_call(self.heads.values(), batch, self.base)

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
        weights: Sequence[Mapping[str, float]] | None = None,
        top: int = 3,
    ) -> list[Prediction]:
        """The best labels for each row.

        Args:
            output: the backbone's.
            batch: what it was the output of.
            tasks: whose head answers, for each row; of several the head with the best label.
            routings: what the predictions say of how that task was found.
            weights: the router's, for each row; without them all heads count alike.
            top: how many labels.
        """
        chosen = [(one,) if isinstance(one, str) else tuple(one) for one in tasks]
        logits: list[dict[str, Tensor]] = [{} for _ in chosen]
        for task, head in self.heads.items():
            rows = [row for row, names in enumerate(chosen) if task in names]
            if not rows:
                continue
            index = torch.tensor(rows)
            found = head(take_rows(output, index, len(chosen)), {k: v[index] for k, v in batch.items()}).cpu()
            for row, values in zip(rows, found, strict=True):
                logits[row][task] = values
        known: Sequence[Routing | None] = routings or [None] * len(logits)
        counts = weights or [dict.fromkeys(own, 1.0) for own in logits]
        problems = self.problems
        answers = [
            make_prediction(own, self.labels, problems, weight, self.options, top, routing, self._rule)
            for own, weight, routing in zip(logits, counts, known, strict=True)
        ]
        return self._with_further(answers, output, batch, top) if self.further else answers

    def _with_further(
        self, answers: list[Prediction], output: Any, batch: dict[str, Tensor], top: int
    ) -> list[Prediction]:
        """Answers with those of the further heads of their tasks."""
        found: list[dict[str, Prediction]] = [{} for _ in answers]
        for task, heads in self.further.items():
            rows = [row for row, answer in enumerate(answers) if answer.task == task]
            if not rows:
                continue
            index = torch.tensor(rows)
            part, inputs = take_rows(output, index, len(answers)), {k: v[index] for k, v in batch.items()}
            for name, own in heads.items():
                labels, problems = {task: own.labels}, {task: own.head.problem_type}
                for row, values in zip(rows, own.head(part, inputs).cpu(), strict=True):
                    routing = answers[row].routing
                    one = make_prediction(
                        {task: values}, labels, problems, {task: 1.0}, self.options, top, routing, self._rule
                    )
                    found[row][name] = replace(one, routing=None)
        return [replace(answer, heads=own) if own else answer for answer, own in zip(answers, found, strict=True)]


class Answering:
    """What can be asked of anything that answers: a loaded bundle, a static merge, a routed peer."""

    def __init__(self, core: Core) -> None:
        self._core = core

    @property
    def core(self) -> Core:
        """The base, the heads, and what reads inputs for them."""
        return self._core

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return list(self.core.tasks)

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Label names of each task that has a head."""
        return dict(self.core.labels)

    @property
    def problems(self) -> dict[str, ProblemType]:
        """What the outputs of each task's head mean, in Hugging Face's words."""
        return self.core.problems

    @property
    def shared_labels(self) -> list[list[str]]:
        """Groups of `task/label` that mean the same thing, as the recipe declares them."""
        return self.core.shared_labels

    @property
    def writes(self) -> bool:
        """Whether tasks answer with text (`generate`): none has labels, and the base generates."""
        return self.core.writes

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or for images the image processor.

        Raises:
            InputError: the bundle has none.
        """
        return self.core.reader.processor

    @property
    def takes_images(self) -> bool:
        """Whether inputs are images; text otherwise."""
        return self.core.reader.image
