"""A loaded bundle: takes inputs without a task name, finds the task and answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from massmerge.model.route.one_pass import OnePass
from massmerge.model.route.stages import milliseconds
from massmerge.model.second_pass.sets import Passed
from massmerge.recipe import Unknown
from massmerge.routing.sessions import Keys, SessionKeys, Sessions, all_together, session_batches

Forward = Callable[[Sequence[int], Sequence[Routing]], Passed]
"""The pass whose output heads read, of the inputs of a batch at some positions, with a routing for each of them."""


class Model(Generative):
    """One backbone, many tasks. Safe to use from several threads.

    Args:
        core: the base, the heads, and what reads inputs for them.
        stages: what finds the tasks of an input.
        sets: what answers with the tasks that were found.
    """

    @property
    def answers_at_once(self) -> bool:
        """Whether `predict(passes=1)` is possible: the first pass is the base's, and tasks have heads."""
        return bool(self.core.heads) and OnePass.possible(self.core, self.stages)

    def predict(
        self,
        inputs: Any,
        *,
        task: str | Sequence[str] | None = None,
        route: Literal["input", "batch"] = "input",
        passes: Literal[1, 2] = 2,
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
            passes: 1 to answer with the heads on the base's own features, at the cost of about one forward pass; 2 for the
                second pass, with what the experts have learnt.
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
            "on_error": on_error, "passes": passes,
        }  # fmt: skip
        return all_together(several(inputs), session, partial(self.stream, **options))

    def stream(
        self,
        inputs: Iterable[Any],
        *,
        task: str | Sequence[str] | None = None,
        route: Literal["input", "batch"] = "input",
        passes: Literal[1, 2] = 2,
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
        if passes not in (1, 2):
            raise InputError(f"passes is 1 or 2, not {passes!r}.")
        if session is not None and route == "batch":
            raise InputError("route='batch' makes one decision for all inputs: leave it out, or session.")
        memory = Sessions() if memory is None else memory
        for keys, items in session_batches(inputs, session, batch_size):
            for rows in self.core.rows(items, batch_size, on_error):
                good = [key for key, row in zip(keys, rows, strict=True) if not isinstance(row, InputError)]
                own = None if session is None else SessionKeys(memory, good)
                answer = partial(self._answer, choice=choice, route=route, passes=passes, top=top, session=own)
                for prediction in answered(rows, answer, Prediction):
                    yield or_raised(prediction, on_error)

    def outcomes(
        self, inputs: Sequence[Any], tasks: Sequence[str], *, batch_size: int = 32, passes: Literal[1, 2] = 2
    ) -> list[tuple[Prediction, Prediction]]:
        """For each input two answers from the same passes: that of `predict`, and that of the head of the task named.

        The second is how methods are compared whose heads are given: routing still selects what is merged. Neither abstains.

        Args:
            inputs: what to answer.
            tasks: the true task of each.
            batch_size: how many inputs run at once.
            passes: as in `predict`.
        """
        if len(inputs) != len(tasks):
            raise InputError(f"{len(inputs)} inputs and {len(tasks)} tasks: each input needs the name of its task.")
        choice, known = self.stages.choice(unknown=Unknown()), [t for t in tasks if self.core.positions(t)]
        found: list[tuple[Prediction, Prediction]] = []
        for batch in self.core.batches(inputs, batch_size):
            once = OnePass(self.core, self.stages, batch) if passes == 1 else None
            forward = once.passed if once else self._second_pass(batch)
            routings = self._settled(
                forward, self.stages.route(batch, choice, seen=None if once is None else once.seen)[0]
            )
            passed = forward(range(len(routings)), routings)
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
        return [
            one
            for rows, own in batches
            for one in self._answer_routed(self._second_pass(self.core.batch(rows)), list(enumerate(own)), {}, top)
        ]

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
        self, rows: list[Row], *, choice: Choice, route: str, passes: int, top: int, session: SessionKeys | None
    ) -> list[Prediction]:
        batch = self.core.batch(rows)
        once = OnePass(self.core, self.stages, batch) if passes == 1 else None
        routings, timings = self.stages.route(batch, choice, route, session, None if once is None else once.seen)
        timings |= {"first pass": once.milliseconds, "second pass": 0.0} if once else {}
        forward = once.passed if once else self._second_pass(batch)
        answer = self._answer_unclear if route == "input" else self._answer_clear
        found = answer(forward, routings, timings, top)
        self.core.refuse_damage()  # what was computed while a file changed is no answer
        return [or_unclear(one, choice.unknown.confidence) for one in found]

    def _second_pass(self, batch: dict[str, Tensor]) -> Forward:
        """The second pass of the inputs of a batch that are at some positions."""

        def run(rows: Sequence[int], routings: Sequence[Routing]) -> Passed:
            """The second pass of some of the inputs."""
            whole = list(rows) == list(range(next(iter(batch.values())).shape[0]))
            part = batch if whole else {k: v[torch.tensor(rows)] for k, v in batch.items()}
            return self.sets.forward(part, routings, for_heads=True)

        return run

    def _settled(self, forward: Forward, routings: list[Routing]) -> list[Routing]:
        """The routings, with that of an unclear input as its candidates' heads decide."""
        if len(self.stages.spread(routings)) == len(routings):
            return routings
        answers = self._answer_unclear(forward, routings, {}, 1)
        return [answer.routing or routing for answer, routing in zip(answers, routings, strict=True)]

    def _answer_unclear(
        self, forward: Forward, routings: list[Routing], timings: dict[str, float], top: int
    ) -> list[Prediction]:
        """Answers of which an unclear input's is the best of several candidates'."""
        asked = self.stages.spread(routings)
        answers = self._answer_routed(forward, asked, timings, top)
        if len(asked) == len(routings):
            return answers
        timings["inputs"] = len(routings)
        return self.stages.settle(zip((i for i, _ in asked), answers, strict=True))

    def _answer_clear(
        self, forward: Forward, routings: list[Routing], timings: dict[str, float], top: int
    ) -> list[Prediction]:
        return self._answer_routed(forward, list(enumerate(routings)), timings, top)

    def _answer_routed(
        self, forward: Forward, asked: Sequence[tuple[int, Routing]], timings: dict[str, float], top: int
    ) -> list[Prediction]:
        """Answers to inputs, each given by its position and a routing of it."""
        known = [i for i, (_, routing) in enumerate(asked) if routing.selected]
        predictions = [Prediction(None, routing=routing) for _, routing in asked]
        if known:
            chosen = [asked[i][1] for i in known]
            began = time.perf_counter()
            passed = forward([asked[i][0] for i in known], chosen)
            timings.setdefault("second pass", milliseconds(began))
            began = time.perf_counter()
            for i, prediction in zip(known, self._heads(passed, chosen, top), strict=True):
                predictions[i] = prediction
            timings["heads"] = milliseconds(began)
        timings["inputs"] = len(asked)
        return [replace(p, timings=timings) for p in predictions]

    def _heads(self, passed: Passed, routings: list[Routing], top: int) -> list[Prediction]:
        """The best label of each input over the heads of its selected set."""
        own = [routings[i] for i in passed.order]
        selected, weights = [r.selected for r in own], [r.weights for r in own]
        found = self.core.answers(passed.output, passed.batch, selected, routings=own, weights=weights, top=top)
        return passed.back(found)
