"""What a method answers to every sample, without and with the task given; computed once and kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from massmerge.evaluation.metrics import Given, given_of, written
from massmerge.model.answers import Answer, Prediction
from massmerge.model.model import Model
from massmerge.model.unrouted import OneBackbone
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.figures import Measured, summarize


class Compared(Protocol):
    """A method that is compared: a static merge, a routed peer."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that answers need, heads apart."""
        ...

    def outcomes(
        self, inputs: Sequence[Any], tasks: Sequence[str], *, batch_size: int = 32, **options: Any
    ) -> list[tuple[Prediction, Prediction]]:
        """For each input the answer with the head unknown, and the answer with its task given; `options` are of texts."""
        ...


@dataclass(frozen=True)
class Answered:
    """A method's answers to the samples of some tasks, in their order."""

    tasks: list[str]
    free: list[Given]
    """Without the task's name; nothing in them where a method needs the task."""
    given: list[Given]
    nbytes: int
    milliseconds: float
    """An input, reading and heads included."""
    heads: list[dict[str, tuple[str, float]]] | None = None
    """Of a method that compares heads by their logits: for each input the best label of each, and its logit."""

    @property
    def needs_task(self) -> bool:
        """Whether there is no answer without the task's name."""
        return all(given.label is None for given in self.free)

    def measure(self, context: StudyContext, *, given: bool) -> Measured:
        """The figure of each task and their mean."""
        return measure_tasks(context, self.tasks, self.given if given else self.free)


def answers_of(
    context: StudyContext,
    name: str,
    about: Mapping[str, Any],
    make: Callable[[], Compared],
    tasks: Sequence[str] | None = None,
) -> Answered:
    """The answers of a method to the samples of some tasks, from an earlier run if it had them.

    Args:
        context: the study's.
        name: of the method.
        about: everything that the answers depend on beside bundle and rows.
        make: makes the method; called only if its answers are not known.
        tasks: whose samples; all by default.
    """
    chosen = list(tasks or context.measured)
    found = context.cell(
        "answers", {"method": name, **about, "tasks": chosen}, lambda: _run(context, name, make, chosen)
    )
    return _answered(chosen, found)


def mass_answers(
    context: StudyContext,
    model: Callable[[], Model],
    about: Mapping[str, Any],
    nbytes: int,
    tasks: Sequence[str] | None = None,
) -> tuple[Answered, Answered]:
    """The answers of a bundle: routed, as those of every method; and with the task given from the start, without routing."""
    chosen = list(tasks or context.measured)
    found = context.cell(
        "answers", {"method": "mass", **about, "tasks": chosen}, lambda: _run_mass(context, model(), nbytes, chosen)
    )
    return _answered(chosen, found["routed"]), _answered(chosen, found["known"])


def measure_tasks(context: StudyContext, tasks: Sequence[str], answers: Sequence[Given]) -> Measured:
    """The metric of each task over its answers, and their mean; answers are in the order of the tasks' samples."""
    shares: dict[str, float] = {}
    at = 0
    for task in tasks:
        count = context.ready.counts[task]
        shares[task] = context.figure(task, answers[at : at + count])
        at += count
    return summarize(shares, context.ready.counts, context.references)


def _answered(tasks: list[str], found: Mapping[str, Any]) -> Answered:
    free, given = ([Given(*one) for one in found[key]] for key in ("free", "given"))
    heads = [{task: (label, logit) for task, (label, logit) in one.items()} for one in found.get("heads", [])]
    return Answered(tasks, free, given, found["bytes"], found["ms"], heads or None)


def _run(context: StudyContext, name: str, make: Callable[[], Compared], tasks: Sequence[str]) -> dict[str, Any]:
    model = make()
    samples = [sample for task in tasks for sample in context.samples if sample.task == task]
    # Inputs of like size share a batch; a method with a model for each task must not change it for every input.
    apart = bool(getattr(model, "needs_task", False))
    order = sorted(
        range(len(samples)), key=lambda i: (tasks.index(samples[i].task) if apart else 0, context.size(samples[i]), i)
    )
    pairs: list[tuple[Given, Given]] = [(Given(), Given())] * len(samples)
    heads: list[dict[str, tuple[str, float]]] = [{}] * len(samples)
    size, spent = context.settings.batch_size, 0.0
    chunks = [order[at : at + size] for at in range(0, len(order), size)]
    for chunk in context.progress(chunks, name, len(chunks)):
        inputs = [context.input(samples[i]) for i in chunk]
        began = time.process_time()  # what else the machine does at that time does not count
        found = model.outcomes(inputs, [samples[i].task for i in chunk], batch_size=size, **context.generation)
        spent += time.process_time() - began
        for i, (free, given) in zip(chunk, found, strict=True):
            pairs[i] = scored(context, free), scored(context, given)
            heads[i] = _best_of_heads(free) if isinstance(model, OneBackbone) else {}
    compared = bool(heads) and all(one.keys() == heads[0].keys() for one in heads) and len(heads[0]) > 1
    return {
        **({"heads": heads} if compared else {}),
        "free": [pair[0] for pair in pairs],
        "given": [pair[1] for pair in pairs],
        "bytes": model.nbytes,
        "ms": round(1000 * spent / len(samples), 3),
    }


def _run_mass(context: StudyContext, model: Model, nbytes: int, tasks: Sequence[str]) -> dict[str, Any]:
    return {
        "routed": _run(context, "mass", lambda: routed_outcomes(model, nbytes), tasks),
        "known": _run(
            context, "mass, task given", lambda: _Sized(partial(_known, model), nbytes, needs_task=True), tasks
        ),
    }


@dataclass(frozen=True)
class _Sized:
    """A bundle's answers with its size."""

    outcomes: Callable[..., list[tuple[Prediction, Prediction]]]
    nbytes: int
    needs_task: bool = False


def one_pass_outcomes(model: Model, nbytes: int) -> Compared:
    """A bundle as it answers by one pass: heads on the base's own features."""
    return _Sized(partial(model.outcomes, passes=1), nbytes)


def _best_of_heads(answer: Prediction) -> dict[str, tuple[str, float]]:
    """The best label of each head, and its logit; nothing of heads whose answer is no single label."""
    found: dict[str, tuple[str, float]] = {}
    ranked: list[Prediction | Answer] = [answer, *answer.alternatives]
    for one in ranked:
        if one.task is not None and one.label is not None and one.logit is not None:
            found.setdefault(one.task, (one.label, one.logit))
    return found if answer.labels is None else {}


def routed_outcomes(model: Model, nbytes: int) -> Compared:
    """A bundle as it answers: with labels, or with texts."""
    return _Sized(partial(_written, model) if model.writes else model.outcomes, nbytes)


def _written(
    model: Model, inputs: Sequence[Any], tasks: Sequence[str], *, batch_size: int = 32, **options: Any
) -> list[tuple[Prediction, Prediction]]:
    return [(answer, answer) for answer in _texts(model, inputs, batch_size=batch_size, **options)]


def _texts(model: Model, inputs: Sequence[Any], **options: Any) -> list[Prediction]:
    """Texts as answers. They name no task, as those of other methods: a text is right or wrong whatever set wrote it."""
    return [Prediction(None, one.text) for one in model.generate(inputs, unknown={}, **options)]


def _known(
    model: Model, inputs: Sequence[Any], tasks: Sequence[str], *, batch_size: int = 32, **options: Any
) -> list[tuple[Prediction, Prediction]]:
    """Answers with the task given from the start, which needs no first pass; there are none without it."""
    found: list[tuple[Prediction, Prediction]] = [(Prediction(None), Prediction(None))] * len(inputs)
    for task in dict.fromkeys(tasks):
        places = [i for i, name in enumerate(tasks) if name == task]
        given = [inputs[i] for i in places]
        if model.writes:
            answers = _texts(model, given, task=task, batch_size=batch_size, **options)
        else:
            answers = model.predict(given, task=task, top=1, batch_size=batch_size)
        for place, answer in zip(places, answers, strict=True):
            found[place] = Prediction(None), answer
    return found


def scored(context: StudyContext, answer: Prediction) -> Given:
    """An answer as it is scored."""
    return written(None, answer.label) if context.ready.writes else given_of(answer)
