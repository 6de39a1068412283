"""Answers to inputs by sets, each computed once: thresholds, merges and batches are then looked up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import massmerge
from massmerge.answers import Routing
from massmerge.evaluation.metrics import Given, written
from massmerge.evaluation.studies.cells import checksum
from massmerge.evaluation.studies.context import StudyContext
from massmerge.model import Model
from massmerge.recipe import AnswerOptions
from massmerge.runtime import Runtime

_TEXT = ""  # in the place of a head's task: what a set writes is of the set


class HeadAnswer(NamedTuple):
    """The best label of one head."""

    label: str
    logit: float
    score: float


Heads = dict[str, HeadAnswer]
"""By task the best label of each head of a set."""


class AnswerBook:
    """What the heads of a set say to an input, after the second pass with that set.

    Args:
        context: the study's.
        runtime: the bundle's, with the adaptive merge that is wanted.
    """

    def __init__(self, context: StudyContext, runtime: Runtime) -> None:
        self._context, self._model, self._options = context, Model(runtime), runtime.recipe.answer
        about = ["answers", massmerge.__version__, context.bundle_identity, self._options.merge]
        self._about = checksum([*about, context.generation] if context.ready.writes else about)
        self._contents = [context.content(sample) for sample in context.samples]

    def heads(self, places: Sequence[int], routings: Sequence[Routing], what: str = "second pass") -> list[Heads]:
        """For each pair of a sample's place and a routing the best label of each head of its set.

        Only `selected` of a routing counts, and the weights if the merge is weighted.
        """
        keys = [self._key(place, routing) for place, routing in zip(places, routings, strict=True)]
        cells = self._context.cells
        missing: dict[str, int] = {key: i for i, key in enumerate(keys) if key not in cells}
        order = sorted(missing.values(), key=lambda i: (self._context.size(self._context.samples[places[i]]), i))
        size = self._context.settings.batch_size
        chunks = [order[at : at + size] for at in range(0, len(order), size)]
        everything = sum(map(len, self._model.labels.values()))
        for chunk in self._context.progress(chunks, what, len(chunks)):
            inputs = [self._context.input(self._context.samples[places[i]]) for i in chunk]
            chosen = [routings[i] for i in chunk]
            if self._model.writes:
                texts = self._model.write(inputs, chosen, batch_size=size, **self._context.generation)
                for i, text in zip(chunk, texts, strict=True):
                    cells.put(keys[i], {_TEXT: [text.text, 0.0, 0.0]})
                continue
            answers = self._model.answer(inputs, chosen, top=everything, batch_size=size)
            for i, answer in zip(chunk, answers, strict=True):
                ranked = [(answer.task, answer.label, answer.logit, answer.score)]
                ranked += [(a.task, a.label, a.logit, a.score) for a in answer.alternatives]
                best: dict[str, Any] = {}
                for task, *rest in ranked:
                    best.setdefault(str(task), rest)
                cells.put(keys[i], best)
        return [{task: HeadAnswer(*values) for task, values in cells[key].items()} for key in keys]

    def answers(self, routings: Sequence[Routing], options: AnswerOptions | None = None) -> list[Given]:
        """The answer to every sample by its routing; labels of several heads are compared as the options say."""
        wanted = options or self._options
        heads = self.heads(range(len(routings)), routings)
        if self._model.writes:
            return [written(None, one[_TEXT].label) for one in heads]
        return [choose(one, routing.weights, wanted) for one, routing in zip(heads, routings, strict=True)]

    def _key(self, place: int, routing: Routing) -> str:
        chosen = sorted(routing.selected)
        weighted = self._options.merge == "weighted" and len(chosen) > 1
        weights = [round(routing.weights[task], 5) for task in chosen] if weighted else None
        return checksum([self._about, self._contents[place], chosen, weights])


def choose(heads: Heads, weights: Mapping[str, float], options: AnswerOptions) -> Given:
    """The answer of a set: the best label over its heads, as `rank_answers` would choose it."""

    def value(task: str) -> float:
        """By what the best label of a task is compared with others."""
        found = heads[task]
        if options.score == "probability":
            return found.score
        if options.score == "logit_and_weight":
            return found.logit + options.weight * math.log(max(weights[task], 1e-12))
        return found.logit

    best = max(heads, key=value)
    return Given(best, heads[best].label, heads[best].score)
