"""Answers to inputs by sets, each computed once: thresholds, merges and batches are then looked up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import massmerge
from massmerge.evaluation.metrics import Given, written
from massmerge.evaluation.suite import join_labels
from massmerge.model.answers import Answer, Generation, Prediction, Routing, contenders, passing
from massmerge.model.explain import heads_of
from massmerge.model.model import Model
from massmerge.model.row_job import is_worth_it
from massmerge.recipe import AnswerOptions, ProblemType
from massmerge.research.studies.cells import checksum
from massmerge.research.studies.context import StudyContext

_TEXT = ""  # in the place of a head's task: what a set writes is of the set


class BestOfHead(NamedTuple):
    """What one head answers: its best label, of a multi-label head all that pass as `join_labels` writes them."""

    label: str
    logit: float
    score: float | None
    """None of a head that gives a number."""


Heads = dict[str, BestOfHead]
"""By task the best label of each head of a set."""


class AnswerBook:
    """What the heads of a set say to an input, after the second pass with that set.

    Args:
        context: the study's.
        model: the bundle's, with the adaptive merge that is wanted.
    """

    def __init__(self, context: StudyContext, model: Model) -> None:
        self._context, self._model = context, model
        self._options = model.core.options
        about = ["answers", massmerge.__version__, context.bundle_identity, self._options.merge]
        self._about = checksum([*about, context.generation] if context.ready.writes else about)

    def heads(self, places: Sequence[int], routings: Sequence[Routing], what: str = "second pass") -> list[Heads]:
        """For each pair of a sample's place and a routing the best label of each head of its set.

        Only `selected` of a routing counts, and the weights if the merge is weighted.
        """
        keys = [self._key(place, routing) for place, routing in zip(places, routings, strict=True)]
        cells = self._context.cells
        missing: dict[str, int] = {key: i for i, key in enumerate(keys) if key not in cells}
        order = sorted(missing.values(), key=lambda i: (self._context.size(self._context.samples[places[i]]), i))
        asked = [(places[i], routings[i]) for i in order]
        for i, found in zip(order, self._found(asked, what), strict=True):
            cells.put(keys[i], found)
        return [{task: BestOfHead(*values) for task, values in cells[key].items()} for key in keys]

    def _found(self, asked: Sequence[tuple[int, Routing]], what: str) -> Iterator[dict[str, Any]]:
        """What the heads of each set say, as cells: by the workers of an engine, if there are some and enough to do."""
        context, size = self._context, self._context.settings.batch_size
        options: dict[str, Any] = {"batch_size": size}
        options |= context.generation if self._model.writes else {"top": self._labels}
        if context.engine is not None and is_worth_it(len(asked)):
            context.tell(f"{what}: {len(asked):,} rows go to the workers")
            with context.answering() as model:
                call: Any = model.write_sets if self._model.writes else model.answer_sets
                rows = ((context.stored(context.samples[place]), routing) for place, routing in asked)
                yield from map(self._cell, call(rows, answer=self._options, **options))
            return
        run: Any = self._model.write if self._model.writes else self._model.answer
        chunks = [asked[at : at + size] for at in range(0, len(asked), size)]
        for chunk in context.progress(chunks, what, len(chunks)):
            inputs = [context.input(context.samples[place]) for place, _ in chunk]
            yield from map(self._cell, run(inputs, [routing for _, routing in chunk], **options))

    @property
    def _labels(self) -> int:
        return sum(map(len, self._model.labels.values()))

    def _cell(self, found: Prediction | Generation) -> dict[str, Any]:
        if isinstance(found, Generation):
            return {_TEXT: [found.text, 0.0, 0.0]}
        return {task: self._best(ranked) for task, ranked in heads_of(found, self._labels).items()}

    def settled(self, routings: Sequence[Routing]) -> list[Routing]:
        """The routings of all samples, with that of an unclear one as its candidates' heads decide, as in `predict`."""
        spreading = self._model.stages.spread(routings)
        several = Counter(i for i, _ in spreading)
        asked = [(i, routing) for i, routing in spreading if several[i] > 1]
        heads = self.heads([i for i, _ in asked], [routing for _, routing in asked], "candidates")
        given = [
            (i, Prediction(task, *answer, routing=routing))
            for (i, routing), found in zip(asked, heads, strict=True)
            for task, answer in ((t, (a.label, a.score, a.logit)) for t, a in found.items())
        ]
        best = dict(zip(dict.fromkeys(i for i, _ in given), self._model.stages.settle(given), strict=True))
        return [(best[i].routing or routing) if i in best else routing for i, routing in enumerate(routings)]

    def answers(self, routings: Sequence[Routing]) -> list[Given]:
        """The answer to every sample by its routing; none where that abstains."""
        known = [i for i, routing in enumerate(routings) if routing.selected]
        found = [Given()] * len(routings)
        for i, heads in zip(known, self.heads(known, [routings[i] for i in known]), strict=True):
            if self._model.writes:
                found[i] = written(None, heads[_TEXT].label)
            else:
                found[i] = choose(heads, routings[i].weights, self._options, self._model.problems)
        return found

    def _best(self, ranked: list[Answer]) -> BestOfHead:
        first = ranked[0]
        if self._model.problems[first.task] != "multi_label_classification":
            return BestOfHead(first.label, first.logit, first.score)
        passed = passing((a.score or 0.0 for a in ranked), (a.label for a in ranked))
        return BestOfHead(join_labels(passed), first.logit, first.score)

    def _key(self, place: int, routing: Routing) -> str:
        chosen = sorted(routing.selected)
        weighted = self._options.merge == "weighted" and len(chosen) > 1
        weights = [round(routing.weights[task], 5) for task in chosen] if weighted else None
        return checksum([self._about, self._context.contents[place], chosen, weights])


def choose(
    heads: Heads, weights: Mapping[str, float], options: AnswerOptions, problems: Mapping[str, ProblemType]
) -> Given:
    """The answer of a set: the best label over its heads, as `rank_answers` would choose it."""
    if not heads:
        return Given()  # the output was not finite

    def value(task: str) -> float:
        """By what the best label of a task is compared with others."""
        found = heads[task]
        if options.score == "probability" and found.score is not None:
            return found.score
        if options.score == "logit_and_weight":
            return found.logit + options.weight * math.log(max(weights[task], 1e-12))
        return found.logit

    first = contenders({task: problems[task] for task in heads}, weights)
    best = max((task for task in heads if task in first), key=value)
    found = heads[best]
    return Given(best, found.label, found.logit if found.score is None else found.score)
