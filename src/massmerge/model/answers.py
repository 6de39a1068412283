"""What a model answers: routings, predictions, and how the best label over several heads is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from massmerge.errors import InputError, MassError
from massmerge.model.inputs import CutRow
from massmerge.recipe import AnswerOptions, ProblemType, Unknown
from massmerge.routing.confidence import TEXTS, ConfidenceRule, label_confidence

_PASSES = 0.5  # probability of a label of a multi-label head above which it is given


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
    probabilities: dict[str, float] = field(default_factory=dict)
    """How probable it is that each task is the right one; they add up to 1. Empty where the method cannot tell."""

    typicality: float | None = None
    """About which share of the tasks' own inputs is less typical of the tasks; of a calibrated bundle only."""

    @property
    def confidence(self) -> float | None:
        """The probability that the best task is the right one."""
        best = (
            self.selected[0]
            if self.selected
            else max(self.probabilities, key=self.probabilities.__getitem__, default=None)
        )
        return None if best is None else self.probabilities.get(best)

    @property
    def ranks(self) -> dict[str, int]:
        """Place of each task, 1 being the best."""
        order = sorted(self.weights, key=lambda task: -self.weights[task])
        return {task: place for place, task in enumerate(order, 1)}


@dataclass(frozen=True)
class Answer:
    """One label of one task, or the number that a regression head gives."""

    task: str
    label: str
    score: float | None
    """Its probability: among the labels of its head, or of a multi-label head by itself. None for a number."""
    logit: float
    value: float | None = None
    """The number, of a head that gives one."""


@dataclass(frozen=True)
class Prediction:
    """The answer to one input."""

    task: str | None
    """None where the model abstained, or the input could not be answered."""
    label: str | None = None
    """The best label; of a regression head the name of its output. None where no label of a multi-label head passes."""
    score: float | None = None
    """The head's own probability of the label."""
    confidence: float | None = field(default=None, kw_only=True)
    """The probability that task and label are both right. Where the model abstained because it was too low, that of the
    answer it would have been."""
    logit: float | None = None
    alternatives: list[Answer] = field(default_factory=list)
    """The next best labels, over all heads of the selected set."""
    routing: Routing | None = None
    timings: dict[str, float] = field(default_factory=dict)
    """Milliseconds of its batch: first pass, routing, second pass, heads; and the size of the batch."""
    truncated: bool = False
    """Whether the end of the text was left out, because the model takes no more tokens."""
    error: str | None = None
    labels: list[str] | None = None
    """Of a multi-label head every label whose probability is above 0.5, the most probable first; None for other heads."""
    scores: list[float] | None = None
    """Their probabilities."""
    value: float | None = None
    """The number that a regression head gives; None for other heads."""
    heads: dict[str, Prediction] = field(default_factory=dict)
    """The answers of the task's further heads, by name."""

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Generation:
    """What was written in answer to one prompt."""

    task: str | None
    """The best task of the selected set; None where the model abstained, or the prompt could not be read."""
    confidence: float | None = field(default=None, kw_only=True)
    """The probability that the task is right; nothing is said of the text."""
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
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token, where `logprobs` asks for it."""
    end: str | None = None
    """`stop` (an end token or a stop string) or `length`; None where transformers' `generate` does not tell."""
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The generation as plain data."""
        return asdict(self)


_A = TypeVar("_A", Prediction, Generation)


def answered(rows: Sequence[Any], answer: Callable[[list[Any]], Iterable[_A]], kind: type[_A]) -> Iterator[_A]:
    """An answer to each row of a batch, in order.

    Args:
        rows: inputs as tensors, or the error where one could not be read.
        answer: gives the answers to those that could be.
        kind: what an error is wrapped in.
    """
    good = [row for row in rows if not isinstance(row, InputError)]
    found = iter(answer(good) if good else [])
    for row in rows:
        if isinstance(row, InputError):
            yield kind(None, error=str(row))
        else:
            one = next(found)
            yield replace(one, truncated=True) if isinstance(row, CutRow) else one


def or_raised(answer: _A, on_error: str) -> _A:
    """An answer; with `raise` an error that stands in its place is raised."""
    if answer.error and on_error == "raise":
        raise MassError(answer.error)
    return answer


def make_prediction(
    logits: Mapping[str, Tensor],
    labels: Mapping[str, Sequence[str]],
    problems: Mapping[str, ProblemType],
    weights: Mapping[str, float],
    options: AnswerOptions,
    top: int,
    routing: Routing | None = None,
    rule: ConfidenceRule = TEXTS,
) -> Prediction:
    """The answer of a selected set: the best label over its heads, with all that pass where that is a multi-label head's.

    Args:
        logits: for each task of the set that has a head, its logits (labels,).
        labels: names of each task's labels.
        problems: what each head's outputs mean.
        weights: the router's weights.
        options: by which score labels of different heads are compared.
        top: how many answers, the best included.
        routing: how the set was found.
        rule: how probabilities become a confidence.
    """
    if not logits:
        names = ", ".join(routing.selected if routing else ())
        return Prediction(None, routing=routing, error=f"belongs to {names}, which has no head to answer with.")
    if not all(map(math.isfinite, weights.values())):
        return Prediction(None, error="routing gives NaN or infinity for this input, so there is no answer.")
    if broken := [task for task, values in logits.items() if not bool(values.isfinite().all())]:
        names = ", ".join(broken)
        return Prediction(None, routing=routing, error=f"{names} gives NaN or infinity for this input, so no answer.")
    ranked = rank_answers(logits, labels, problems, weights, options, top)
    best, *others = ranked
    several = problems[best.task] == "multi_label_classification"
    # A number is right or wrong by how near it is, of which nothing is known: the task alone counts.
    sure = 1.0 if best.score is None else label_confidence(best.score, rule)
    if several:
        sure = math.prod(label_confidence(max(p, 1 - p), rule) for p in logits[best.task].sigmoid().tolist())
    if routing is not None and routing.probabilities:
        sure *= routing.probabilities[best.task]
    if not several:
        return Prediction(
            best.task, best.label, best.score, best.logit, others, routing, value=best.value, confidence=sure
        )
    passed = passing(logits[best.task].sigmoid().tolist(), labels[best.task])
    found: dict[str, Any] = {
        "routing": routing, "labels": list(passed), "scores": list(passed.values()), "confidence": sure,
    }  # fmt: skip
    if not passed:
        return Prediction(best.task, alternatives=ranked, **found)
    return Prediction(best.task, best.label, best.score, best.logit, others, **found)


def or_unclear(answer: Prediction, limit: float) -> Prediction:
    """An answer; one of less confidence than the limit becomes that of no task, unless the task was given."""
    routing, sure = answer.routing, answer.confidence
    if (
        sure is None or sure >= limit or routing is None or not routing.residuals
    ):  # without residuals the task was given
        return answer
    return Prediction(None, confidence=sure, routing=replace(routing, selected=[]), timings=answer.timings)


def clear(routing: Routing, limit: float) -> Routing:
    """A routing; with an empty set where its confidence is below the limit, unless the task was given."""
    sure = routing.confidence
    return replace(routing, selected=[]) if sure is not None and sure < limit and routing.residuals else routing


def typical_or_none(routing: Routing, typicality: float, unknown: Unknown) -> Routing:
    """A routing of an input that is so typical of the tasks; with an empty set where that is below the limit."""
    selected = routing.selected if typicality >= unknown.typicality else []
    return replace(routing, typicality=typicality, selected=selected)


def passing(probabilities: Iterable[float], labels: Iterable[str]) -> dict[str, float]:
    """The labels of a multi-label head that are more probable than not, the most probable first."""
    pairs = sorted(zip(labels, probabilities, strict=True), key=lambda pair: -pair[1])
    return {label: probability for label, probability in pairs if probability > _PASSES}


def rank_answers(
    logits: Mapping[str, Tensor], labels: Mapping[str, Sequence[str]], problems: Mapping[str, ProblemType],
    weights: Mapping[str, float], options: AnswerOptions, top: int,
) -> list[Answer]:  # fmt: skip
    """The best labels over the heads of a selected set, best first; see `make_prediction`."""
    ranked: list[tuple[bool, float, Answer]] = []
    first = contenders({task: problems[task] for task in logits}, weights)
    for task, values in logits.items():
        number = problems[task] == "regression"
        several = problems[task] == "multi_label_classification"
        probabilities = values.sigmoid() if several else values.softmax(0)
        by = probabilities if options.score == "probability" else values
        if options.score == "logit_and_weight":
            by = values + options.weight * torch.tensor(max(weights[task], 1e-12)).log()
        best = by.topk(min(top, len(values)))
        for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            logit, probability = float(values[index]), float(probabilities[index])
            numbers = (None, logit, logit) if number else (probability, logit)
            ranked.append((task in first, score, Answer(task, labels[task][index], *numbers)))
    ranked.sort(key=lambda one: (not one[0], -one[1]))
    return [answer for _, _, answer in ranked[:top]]


def contenders(problems: Mapping[str, ProblemType], weights: Mapping[str, float]) -> set[str]:
    """The tasks of a selected set among whose answers the best is chosen.

    A number cannot be compared with labels. It is the answer where the router likes its task best, and else never.
    """
    numbers = {task for task, problem in problems.items() if problem == "regression"}
    for task in numbers:
        if all(weights[task] > weights[other] for other in problems if other != task):
            return {task}
    return set(problems) - numbers or numbers
