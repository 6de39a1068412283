"""A loaded bundle: takes inputs without a task name, finds the task and answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from massmerge.checkpoints.backbone import language_class
from massmerge.errors import InputError
from massmerge.model.answers import Prediction, Routing, answered, or_raised, or_unclear
from massmerge.model.generative import Generative
from massmerge.model.heads.linear import features
from massmerge.model.inputs import Row, several
from massmerge.model.route.decide import Choice
from massmerge.model.route.first_pass import FirstPass
from massmerge.model.route.stages import milliseconds
from massmerge.model.second_pass.sets import Passed
from massmerge.recipe import Unknown
from massmerge.routing.sessions import Keys, SessionKeys, Sessions, all_together, session_batches


class Model(Generative):
    """One backbone, many tasks. Safe to use from several threads.

    Args:
        core: the base, the heads, and what reads inputs for them.
        stages: what finds the tasks of an input.
        sets: what answers with the tasks that were found.
    """

    def predict(
        self,
        inputs: Any,
        *,
        task: str | Sequence[str] | None = None,
        route: Literal["input", "batch"] = "input",
        top: int = 3,
        batch_size: int = 32,
        unknown: Unknown | dict[str, float] | None = None,
        session: Keys = None,
        memory: Sessions | None = None,
        on_error: Literal["raise", "row"] = "raise",
    ) -> list[Prediction]:
        """Answer inputs: text, pairs of texts, PIL images, paths, arrays or ready tensors; one, or any iterable of them.

        Args:
            inputs: what to answer.
            task: a task's name to skip routing, or several to choose among; all by default.
            route: `input` decides for each input by itself, `batch` once for each batch of inputs of one task.
            top: how many answers to give, the best included.
            batch_size: how many inputs run at once.
            unknown: when to answer that no task fits, instead of what the recipe says.
            session: a key for all inputs, or one for each (None for an input by itself): inputs of one key are decided
                together, by the mean of what they say.
            memory: remembers sessions, so that inputs of earlier calls count too; without it a call knows only its own.
            on_error: whether an input that cannot be answered stops everything or has its error in its row.

        Raises:
            InputError: an unknown task, an input that cannot be read, or tasks without heads.
            MassError: the output for an input is NaN or infinite, or it belongs to a task without a head.
        """
        options: dict[str, Any] = {
            "task": task, "route": route, "top": top, "batch_size": batch_size, "unknown": unknown, "memory": memory,
            "on_error": on_error,
        }  # fmt: skip
        return all_together(several(inputs), session, partial(self.stream, **options))

    def stream(
        self,
        inputs: Iterable[Any],
        *,
        task: str | Sequence[str] | None = None,
        route: Literal["input", "batch"] = "input",
        top: int = 3,
        batch_size: int = 32,
        unknown: Unknown | dict[str, float] | None = None,
        session: Keys = None,
        memory: Sessions | None = None,
        on_error: Literal["raise", "row"] = "raise",
    ) -> Iterator[Prediction]:
        """As `predict`, one batch at a time: memory does not grow with the number of inputs.

        Of a session, an input knows those of its own batch and earlier ones; keep the inputs of a session together.
        """
        allowed = self.core.positions(task)
        self._refuse_headless(allowed)
        choice = self.stages.choice(allowed, self.stages.limits(unknown))
        if top < 1 or batch_size < 1:
            raise InputError("top and batch_size must be at least 1.")
        if route not in ("input", "batch"):
            raise InputError(f"route is 'input' or 'batch', not {route!r}.")
        if session is not None and route == "batch":
            raise InputError("route='batch' makes one decision for all inputs: leave it out, or session.")
        memory = Sessions() if memory is None else memory
        for keys, items in session_batches(inputs, session, batch_size):
            for rows in self.core.rows(items, batch_size, on_error):
                good = [key for key, row in zip(keys, rows, strict=True) if not isinstance(row, InputError)]
                own = None if session is None else SessionKeys(memory, good)
                answer = partial(self._answer, choice=choice, route=route, top=top, session=own)
                for prediction in answered(rows, answer, Prediction):
                    yield or_raised(prediction, on_error)

    def outcomes(
        self, inputs: Sequence[Any], tasks: Sequence[str], *, batch_size: int = 32
    ) -> list[tuple[Prediction, Prediction]]:
        """For each input two answers from the same passes: that of `predict`, and that of the head of the task named.

        The second is how methods are compared whose heads are given: routing still selects what is merged. Neither abstains.

        Args:
            inputs: what to answer.
            tasks: the true task of each.
            batch_size: how many inputs run at once.
        """
        if len(inputs) != len(tasks):
            raise InputError(f"{len(inputs)} inputs and {len(tasks)} tasks: each input needs the name of its task.")
        choice, known = self.stages.choice(unknown=Unknown()), [t for t in tasks if self.core.positions(t)]
        found: list[tuple[Prediction, Prediction]] = []
        for batch in self.core.batches(inputs, batch_size):
            routings = self._settled(batch, self.stages.route(batch, choice)[0])
            passed = self.sets.forward(batch, routings, for_heads=True)
            here = known[len(found) : len(found) + len(routings)]
            given = [replace(r, selected=[t], weights={t: 1.0}) for r, t in zip(routings, here, strict=True)]
            free, heads = (self._heads(passed, chosen, 3) for chosen in (routings, given))
            found += zip(free, heads, strict=True)
        return found

    def answer(
        self, inputs: Any, routings: Sequence[Routing], *, top: int = 3, batch_size: int = 32
    ) -> list[Prediction]:
        """Only the second half: answers to inputs that have been routed already, each by the set that was selected for it.

        Args:
            inputs: what to answer.
            routings: for each input its selected set, and the weights where those count.
            top: how many answers to give, the best included.
            batch_size: how many inputs run at once.

        Raises:
            InputError: an unknown task or one without a head, or an input that cannot be read.
        """
        named = {task for routing in routings for task in routing.selected}
        if named:
            self._refuse_headless(self.core.positions(sorted(named)))
        batches = self._with_routings(inputs, routings, batch_size)
        return [one for rows, own in batches for one in self._answer_routed(self.core.batch(rows), own, {}, top)]

    def embed(self, inputs: Any, *, task: str | Sequence[str] | None = None, batch_size: int = 32) -> Tensor:
        """Features (inputs, width) of the second pass."""
        choice = self.stages.choice(self.core.positions(task), Unknown())
        found = []
        for batch in self.core.batches(several(inputs), batch_size):
            passed = self.sets.forward(batch, self.stages.route(batch, choice)[0])
            found.append(features(passed.output, passed.batch)[torch.argsort(torch.tensor(passed.order))].cpu())
        return torch.cat(found) if found else torch.empty(0)

    def activations(self, inputs: Any, *, batch_size: int = 32, first_pass: FirstPass | None = None) -> list[Tensor]:
        """What the voters see: for each voter one activation of the first pass for each input (inputs, width).

        Args:
            inputs: what to look at.
            batch_size: how many inputs run at once.
            first_pass: another pass with voters of its own, instead of the one that decides.
        """
        run = first_pass or self.stages.first.first_pass
        found = [
            [seen.pooled().cpu() for seen in run(batch)] for batch in self.core.batches(several(inputs), batch_size)
        ]
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    # Steps

    def _refuse_headless(self, tasks: list[int]) -> None:
        """Raise an error if none of the tasks has a head."""
        without = [self.tasks[t] for t in tasks if self.tasks[t] not in self.core.heads]
        if len(without) == len(tasks):
            others = "`generate`, `embed`" if language_class(self.core.base.config) else "`embed`"
            raise InputError(f"{', '.join(without)}: no head, so there is no label to answer. Use {others} or `route`.")

    def _answer(
        self, rows: list[Row], *, choice: Choice, route: str, top: int, session: SessionKeys | None
    ) -> list[Prediction]:
        batch = self.core.batch(rows)
        routings, timings = self.stages.route(batch, choice, route, session)
        answer = self._answer_unclear if route == "input" else self._answer_routed
        found = answer(batch, routings, timings, top)
        self.core.refuse_damage()  # what was computed while a file changed is no answer
        return [or_unclear(one, choice.unknown.confidence) for one in found]

    def _settled(self, batch: dict[str, Tensor], routings: list[Routing]) -> list[Routing]:
        """The routings, with that of an unclear input as its candidates' heads decide."""
        if len(self.stages.spread(routings)) == len(routings):
            return routings
        answers = self._answer_unclear(batch, routings, {}, 1)
        return [answer.routing or routing for answer, routing in zip(answers, routings, strict=True)]

    def _answer_unclear(
        self, batch: dict[str, Tensor], routings: list[Routing], timings: dict[str, float], top: int
    ) -> list[Prediction]:
        """Answers of which an unclear input's is the best of several candidates'."""
        asked = self.stages.spread(routings)
        if len(asked) == len(routings):
            return self._answer_routed(batch, routings, timings, top)
        inputs = [i for i, _ in asked]
        rows = {name: tensor[torch.tensor(inputs)] for name, tensor in batch.items()}
        answers = self._answer_routed(rows, [r for _, r in asked], timings, top)
        timings["inputs"] = len(routings)
        return self.stages.settle(zip(inputs, answers, strict=True))

    def _answer_routed(
        self, batch: dict[str, Tensor], routings: list[Routing], timings: dict[str, float], top: int
    ) -> list[Prediction]:
        known = [i for i, routing in enumerate(routings) if routing.selected]
        predictions = [Prediction(None, routing=routing) for routing in routings]
        if known:
            chosen = [routings[i] for i in known]
            part = batch if len(known) == len(routings) else {k: v[torch.tensor(known)] for k, v in batch.items()}
            began = time.perf_counter()
            passed = self.sets.forward(part, chosen, for_heads=True)
            timings["second pass"] = milliseconds(began)
            began = time.perf_counter()
            for i, prediction in zip(known, self._heads(passed, chosen, top), strict=True):
                predictions[i] = prediction
            timings["heads"] = milliseconds(began)
        timings["inputs"] = len(routings)
        return [replace(p, timings=timings) for p in predictions]

    def _heads(self, passed: Passed, routings: list[Routing], top: int) -> list[Prediction]:
        """The best label of each input over the heads of its selected set."""
        own = [routings[i] for i in passed.order]
        selected, weights = [r.selected for r in own], [r.weights for r in own]
        found = self.core.answers(passed.output, passed.batch, selected, routings=own, weights=weights, top=top)
        return passed.back(found)
