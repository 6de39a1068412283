"""What a model answers: routings, predictions, and how the best label over several heads is chosen."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from massmerge.recipe import AnswerOptions


@dataclass(frozen=True)
class Routing:
    """How an input was routed."""

    residuals: dict[str, float]
    """What remains of the activation for each task: with one voter the residual itself, with several the sum of their
    standardised residuals. The least is the best."""
    weights: dict[str, float]
    selected: list[str]
    """Best first; empty where the model abstained."""
    site: str
    """The voters, such as `M0.mean M1.mean`."""
    lift: float | None = None
    """How many times as much of the activation the best task's subspace holds as a random one of its size would."""
    agreement: float | None = None
    """How far the voters agree on the best task, 1 being complete agreement."""
    margin: float | None = None
    """How far the best task is ahead of the next, in standard deviations over the tasks, the mean over voters."""
    confidences: dict[str, float] = field(default_factory=dict)
    """Where several candidates answered an unclear input: how sure the head of each was."""

    @property
    def ranks(self) -> dict[str, int]:
        """Place of each task, 1 being the best."""
        order = sorted(self.weights, key=lambda task: -self.weights[task])
        return {task: place for place, task in enumerate(order, 1)}


@dataclass(frozen=True)
class Answer:
    """One label of one task."""

    task: str
    label: str
    score: float
    """Its probability among the labels of its head; for a head with one output, that output."""
    logit: float


@dataclass(frozen=True)
class Prediction:
    """The answer to one input."""

    task: str | None
    """None where the model abstained, or the input could not be read."""
    label: str | None = None
    score: float | None = None
    logit: float | None = None
    alternatives: list[Answer] = field(default_factory=list)
    """The next best labels, over all heads of the selected set."""
    routing: Routing | None = None
    timings: dict[str, float] = field(default_factory=dict)
    """Milliseconds of its batch: first pass, routing, second pass, heads; and the size of the batch."""
    truncated: bool = False
    """Whether the end of the text was left out, because the model takes no more tokens."""
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Generation:
    """What was written in answer to one prompt."""

    task: str | None
    """The best task of the selected set; None where the model abstained, or the prompt could not be read."""
    text: str | None = None
    """None without a tokenizer too, for prompts that were ready tensors."""
    tokens: list[int] = field(default_factory=list)
    """The text as the model wrote it, without the prompt and without padding."""
    alternatives: list[str] = field(default_factory=list)
    """The other texts, where `num_return_sequences` asks for several."""
    routing: Routing | None = None
    timings: dict[str, float] = field(default_factory=dict)
    """Milliseconds of its batch: first pass, routing, generation; and the size of the batch."""
    truncated: bool = False
    """Whether the end of the prompt was left out, because the model takes no more tokens."""
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The generation as plain data."""
        return asdict(self)


def rank_answers(
    logits: dict[str, Tensor],
    labels: dict[str, tuple[str, ...]],
    weights: dict[str, float],
    options: AnswerOptions,
    top: int,
) -> list[Answer]:
    """The best labels over the heads of a selected set, best first.

    Args:
        logits: for each task of the set its head's logits (labels,).
        labels: names of each task's labels.
        weights: the router's weights.
        options: by which score labels of different heads are compared.
        top: how many.
    """
    ranked: list[tuple[float, Answer]] = []
    for task, values in logits.items():
        probabilities = values.softmax(0) if len(values) > 1 else values
        by = probabilities if options.score == "probability" else values
        if options.score == "logit_and_weight":
            by = values + options.weight * torch.tensor(max(weights[task], 1e-12)).log()
        best = by.topk(min(top, len(values)))
        for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            answer = Answer(task, labels[task][index], float(probabilities[index]), float(values[index]))
            ranked.append((score, answer))
    ranked.sort(key=lambda pair: -pair[0])
    return [answer for _, answer in ranked[:top]]
