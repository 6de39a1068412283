"""Runs the rows of an evaluation: as one stream without task names, with the task given, through the experts."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from massmerge.evaluation.data import RowOrder, batches_of_one_task, stream_order
from massmerge.evaluation.experts import Experts, expert_answers
from massmerge.evaluation.metrics import given_of, written
from massmerge.evaluation.prepared import PreparedEvaluation
from massmerge.evaluation.results import RowResult
from massmerge.evaluation.row_table import RowTable
from massmerge.io.spool import Spool
from massmerge.model.answers import Prediction
from massmerge.model.model import Model
from massmerge.model.row_job import EngineModel
from massmerge.model.static import StaticModel

_WINDOW = 16  # batches
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""Hands the items of an iterable on, knowing what is done with them and how many will come."""


def silent(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
    """No progress to be seen."""
    return items


@dataclass(frozen=True)
class RowAnswers:
    """What is measured."""

    answering: Model | StaticModel | EngineModel
    """A model in this process, or the workers of an engine."""
    static: bool = False
    """Whether it is a static merge, which takes no options of routing."""
    needs_task: bool = False
    """Whether it answers only if the task is given."""

    def item(self, inputs: Spool, place: int) -> Any:
        """An input as it is answered: ready for a model, or as it is stored if it goes to other machines."""
        return inputs.stored(place) if isinstance(self.answering, EngineModel) else inputs[place]

    def watched(self, answers: Iterator[Any], progress: Progress, what: str, total: int) -> Iterable[Any]:
        """Answers as they come; those of an engine come all at once, so it tells by itself how far it is."""
        if not isinstance(self.answering, EngineModel):
            return progress(answers, what, total)
        steps = iter(progress(range(total), what, total))
        self.answering.seen = lambda count: [next(steps, None) for _ in range(count)]
        return answers


def run_stream(
    model: RowAnswers,
    ready: PreparedEvaluation,
    *,
    seed: int,
    route: Literal["input", "batch"],
    batch_size: int,
    unknown: dict[str, float] | None,
    progress: Progress = silent,
) -> tuple[RowTable, dict[str, float]]:
    """Every row once, shuffled, without its task's name: the result of each, and milliseconds per input."""
    if route == "input":
        parts: Sequence[Sequence[tuple[str, int]]] = [_like_lengths(ready, seed, _WINDOW * batch_size)]
    else:
        parts = batches_of_one_task(ready.counts, batch_size, seed)

    def answers() -> Iterator[Prediction]:
        """The answers in the order of the stream."""
        for part in parts:
            items = (model.item(ready.data[task].inputs, place) for task, place in part)
            yield from _answers(model, ready, items, route=route, batch_size=batch_size, unknown=unknown)

    began = time.perf_counter()
    spent: dict[str, float] = {}
    rows = RowTable()
    watched = model.watched(answers(), progress, "answering", sum(map(len, parts)))
    for (task, place), answer in zip(chain.from_iterable(parts), watched, strict=True):
        rows.append(_row(ready, task, place, answer))
        for step, value in answer.timings.items():
            if step != "inputs":
                spent[step] = spent.get(step, 0.0) + value / answer.timings["inputs"]
    spent["all"] = (time.perf_counter() - began) * 1000
    return rows, {step: round(value / len(rows), 3) for step, value in spent.items()}


def _answers(
    model: RowAnswers,
    ready: PreparedEvaluation,
    items: Iterable[Any],
    *,
    batch_size: int,
    task: str | None = None,
    route: Literal["input", "batch"] = "input",
    unknown: dict[str, float] | None = None,
) -> Iterator[Prediction]:
    """Answers to inputs: labels, or texts where the bundle writes."""
    options: dict[str, Any] = {"task": task, "batch_size": batch_size}
    if not model.static:
        options |= {"unknown": unknown} if ready.writes else {"unknown": unknown, "route": route}
    elif model.needs_task and task is None:
        yield from (Prediction(None, error=str(item) if isinstance(item, Exception) else None) for item in items)
        return
    if not ready.writes:
        yield from model.answering.stream(items, top=1, on_error="row", **options)
        return
    for one in model.answering.generate_many(items, on_error="row", **options, **ready.suite.generate):
        given = written(one.task, one.text)
        yield Prediction(
            given.task, given.label, given.score, routing=one.routing, timings=one.timings, error=one.error,
            confidence=one.confidence,
        )  # fmt: skip


def _like_lengths(ready: PreparedEvaluation, seed: int, window: int) -> RowOrder:
    """The stream, texts of each window sorted by length: answers do not depend on their batch, but padding costs time."""

    def length(pair: tuple[str, int]) -> int:
        """Characters of a text; none of an image."""
        item = ready.data[pair[0]].inputs[pair[1]]
        return len(item) if isinstance(item, str) else 0

    return stream_order(ready.counts, seed).sorted_within(window, length)


def _row(ready: PreparedEvaluation, task: str, place: int, answer: Prediction) -> RowResult:
    routing = answer.routing
    residuals = array("f", [routing.residuals[t] for t in ready.tasks] if routing and routing.residuals else [])
    # A static merge routes nothing: the head that answers is whose task it found.
    selected = tuple(routing.selected) if routing else tuple([answer.task] if answer.task else [])
    label = ready.data[task].labels[place]
    sure = answer.confidence
    return RowResult(task, place, label, given_of(answer), selected, residuals, answer.error, confidence=sure)


def run_known(
    model: RowAnswers,
    ready: PreparedEvaluation,
    rows: RowTable,
    *,
    batch_size: int,
    progress: Progress = silent,
) -> None:
    """Answer the rows with their task given.

    Rows that were routed to their own task alone have that answer already: the second pass would be the same.
    """
    other: dict[str, array[int]] = {task: array("q") for task in ready.data}
    for i, row in enumerate(rows):
        if row.selected == (row.task,):
            rows.known[i] = row.given
        elif row.error is None:
            other[row.task].append(i)

    def answers() -> Iterator[tuple[int, Prediction]]:
        """The place of each row that was routed elsewhere, and its answer with the task given."""
        for task, missed in other.items():
            items = (model.item(ready.data[task].inputs, rows[i].place) for i in missed)
            given = _answers(model, ready, items, task=task, batch_size=batch_size)
            yield from zip(missed, given, strict=True)

    for i, answer in model.watched(answers(), progress, "with the task given", sum(map(len, other.values()))):
        rows.known[i] = given_of(answer)


def run_once(
    model: Model, ready: PreparedEvaluation, rows: RowTable, *, batch_size: int, progress: Progress = silent
) -> None:
    """Answer the rows by one pass: heads on the base's own features, chosen by the router and by the task."""
    readable = array("q", (i for i, row in enumerate(rows) if row.error is None))
    chunks = [readable[at : at + batch_size] for at in range(0, len(readable), batch_size)]
    for chunk in progress(chunks, "with one pass", len(chunks)):
        own = [rows[i] for i in chunk]
        inputs = [ready.data[row.task].inputs[row.place] for row in own]
        found = model.outcomes(inputs, [row.task for row in own], batch_size=batch_size, passes=1)
        for i, (free, given) in zip(chunk, found, strict=True):
            rows.once[i], rows.once_known[i] = given_of(free), given_of(given)


def run_experts(
    opened: Experts,
    ready: PreparedEvaluation,
    rows: RowTable,
    *,
    batch_size: int,
    keep: Path | None,
    progress: Progress = silent,
) -> None:
    """Answer the rows of each task with its own expert, one expert in memory at a time."""
    for task, data in ready.data.items():
        options = ready.suite.generate if ready.writes else None
        answers = expert_answers(opened, data, batch_size=batch_size, keep=keep, generate=options, progress=progress)
        own = rows.of_task(task)
        for i, row in zip(own.positions, own, strict=True):
            rows.expert[i] = answers[row.place]
