"""A loaded bundle: takes inputs without a task name, finds the task and answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from massmerge.checkpoints.backbone import language_class
from massmerge.errors import InputError
from massmerge.model.answers import Generation, Prediction, Routing, make_prediction, or_raised
from massmerge.model.generate import Generator, TextStream
from massmerge.model.heads.classify import ShellHead, features
from massmerge.model.inputs import CutRow, Row
from massmerge.model.load import load_runtime, with_decoder_start
from massmerge.model.route.candidates import settle, spread
from massmerge.model.route.first_pass import FirstPass
from massmerge.model.routed import Routed, milliseconds, several
from massmerge.model.second_pass.segments import Segment, Segments
from massmerge.model.trees import take_rows
from massmerge.recipe import Unknown


def load(
    path: str | Path,
    *,
    router: str | None = None,
    device: str = "auto",
    cache: str | int = 0,
    check: bool | Literal["background"] = "background",
    mapped: bool = True,
) -> Model:
    """Load a bundle.

    Args:
        path: the bundle's folder.
        router: `projection`, or one that `mass calibrate` has fitted; the bundle's own choice by default.
        device: where to run, such as `cpu` or `cuda`; a GPU if there is one by default.
        cache: bytes (or `"512MB"`) for dense weights of sets that are used again and again; none by default.
        check: how files are compared with the manifest: in the `background`, which takes little time: small files now, the
            large ones by CRC-32 before the first answer and by SHA-256 after it, and all calls fail as soon as damage is
            found; everything by SHA-256 now (True); or nothing.
        mapped: leave the tensors of base and tasks in their files, which costs less memory. Then every call fails if these
            files have changed, and a file that is cut short during a call ends the process (SIGBUS). False reads them.

    Raises:
        InputError: not a bundle, or damaged.
    """
    return Model(load_runtime(Path(path), router=router, device=device, cache=cache, check=check, mapped=mapped))


class Model(Routed):
    """One backbone, many tasks. Safe to use from several threads."""

    def predict(
        self,
        inputs: Any,
        *,
        task: str | Sequence[str] | None = None,
        route: Literal["input", "batch"] = "input",
        top: int = 3,
        batch_size: int = 32,
        unknown: Unknown | dict[str, float] | None = None,
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
            on_error: whether an input that cannot be answered stops everything or has its error in its row.

        Raises:
            InputError: an unknown task, an input that cannot be read, or tasks without heads.
            MassError: the output for an input is NaN or infinite, or it belongs to a task without a head.
        """
        options = {"task": task, "route": route, "top": top, "batch_size": batch_size, "unknown": unknown}
        return list(self.stream(several(inputs), on_error=on_error, **options))  # type: ignore[arg-type]

    def stream(
        self,
        inputs: Iterable[Any],
        *,
        task: str | Sequence[str] | None = None,
        route: Literal["input", "batch"] = "input",
        top: int = 3,
        batch_size: int = 32,
        unknown: Unknown | dict[str, float] | None = None,
        on_error: Literal["raise", "row"] = "raise",
    ) -> Iterator[Prediction]:
        """As `predict`, one batch at a time: memory does not grow with the number of inputs."""
        allowed = self._allowed(task)
        self._refuse_headless(allowed)
        limits = self._limits(unknown)
        if top < 1 or batch_size < 1:
            raise InputError("top and batch_size must be at least 1.")
        if route not in ("input", "batch"):
            raise InputError(f"route is 'input' or 'batch', not {route!r}.")
        for rows in self._batches(inputs, batch_size, on_error):
            good = [row for row in rows if not isinstance(row, InputError)]
            answers = iter(self._answer(good, allowed, route, top, limits) if good else [])
            for row in rows:
                answer = (
                    Prediction(None, error=str(row)) if isinstance(row, InputError) else _marked(next(answers), row)
                )
                yield or_raised(answer, on_error)

    def outcomes(
        self, inputs: Sequence[Any], tasks: Sequence[str], *, batch_size: int = 32
    ) -> list[tuple[Prediction, Prediction]]:
        """For each input two answers from the same passes: that of `predict`, and that of the head of the task named.

        The second is how methods are compared whose heads are told: routing still selects what is merged. Neither abstains.

        Args:
            inputs: what to answer.
            tasks: the true task of each.
            batch_size: how many inputs run at once.
        """
        if len(inputs) != len(tasks):
            raise InputError(f"{len(inputs)} inputs and {len(tasks)} tasks: each input needs the name of its task.")
        everything, known = self._allowed(None), [self.tasks[i] for task in tasks for i in self._allowed(task)]
        found: list[tuple[Prediction, Prediction]] = []
        for rows in self._readable(inputs, batch_size):
            batch = self._runtime.batch(rows)
            routings = self._settled(batch, self._routings_of(batch, everything, "input", Unknown())[0])
            output, order = self._second_pass(batch, routings, for_heads=True)
            here = known[len(found) : len(found) + len(rows)]
            told = [replace(r, selected=[t], weights={t: 1.0}) for r, t in zip(routings, here, strict=True)]
            free, heads = (self._heads(output, order, batch, chosen, 3) for chosen in (routings, told))
            found += zip(free, heads, strict=True)
        return found

    def generate(
        self,
        prompts: Any,
        *,
        task: str | Sequence[str] | None = None,
        batch_size: int = 8,
        unknown: Unknown | dict[str, float] | None = None,
        on_error: Literal["raise", "row"] = "raise",
        **options: Any,
    ) -> list[Generation]:
        """Write an answer to each prompt, for bundles of encoder-decoders and decoders; prompts are routed one by one.

        Args:
            prompts: texts, or what else `predict` takes.
            task: as in `predict`.
            batch_size: how many prompts run at once.
            unknown: as in `predict`.
            on_error: as in `predict`.
            options: those of transformers' `generate`, such as `max_new_tokens` (64 by default) and `num_beams`.

        Raises:
            InputError: a bundle that generates nothing, a task that answers with labels, or an option that there is not.
        """
        return list(
            self.generate_many(
                several(prompts), task=task, batch_size=batch_size, unknown=unknown, on_error=on_error, **options
            )
        )

    def generate_many(
        self,
        prompts: Iterable[Any],
        *,
        task: str | Sequence[str] | None = None,
        batch_size: int = 8,
        unknown: Unknown | dict[str, float] | None = None,
        on_error: Literal["raise", "row"] = "raise",
        **options: Any,
    ) -> Iterator[Generation]:
        """As `generate`, one batch at a time: memory does not grow with the number of prompts."""
        allowed, limits = self._allowed(task), self._limits(unknown)
        if batch_size < 1:
            raise InputError("batch_size must be at least 1.")
        generator = Generator(self._runtime, [self.tasks[t] for t in allowed], options)
        for rows in self._batches(prompts, batch_size, on_error, generator.read):
            good = [row for row in rows if not isinstance(row, InputError)]
            answers = iter(self._generations(generator, good, allowed, limits) if good else [])
            for row in rows:
                answer = (
                    Generation(None, error=str(row)) if isinstance(row, InputError) else _marked(next(answers), row)
                )
                yield or_raised(answer, on_error)

    def write(
        self, prompts: Any, routings: Sequence[Routing], *, batch_size: int = 8, **options: Any
    ) -> list[Generation]:
        """Only the second half of `generate`: texts for prompts that have been routed already.

        Args:
            prompts: what to answer.
            routings: for each prompt its selected set, and the weights where those count.
            batch_size: how many prompts run at once.
            options: as in `generate`.

        Raises:
            InputError: as `generate` does, or fewer routings than prompts.
        """
        generator = Generator(self._runtime, self.tasks, options)
        batches = self._with_routings(prompts, routings, batch_size, generator.read)
        return [text for rows, own in batches for text in self._written(generator, rows, own)]

    def generate_stream(self, prompt: Any, *, task: str | Sequence[str] | None = None, **options: Any) -> TextStream:
        """The answer to one prompt while it is written: iterate over the result; `task` and `routing` are known at once."""
        allowed = self._allowed(task)
        generator = Generator(self._runtime, [self.tasks[t] for t in allowed], options)
        row = generator.read(prompt)
        routings, _ = self._routings_of(self._runtime.batch([row]), allowed, "input", self._limits(None))
        groups = self._groups(routings)
        return generator.stream(row, routings[0], groups[0][0] if groups else None)

    def route(self, inputs: Any, *, task: str | Sequence[str] | None = None, batch_size: int = 32) -> list[Routing]:
        """Only the first half: residual, weight and selected set of each input.

        An unclear image is decided by the heads of several candidates in `predict`, which are not asked here.
        """
        allowed = self._allowed(task)
        routings: list[Routing] = []
        for rows in self._readable(several(inputs), batch_size):
            batch = self._runtime.batch(rows)
            routings += self._routed(batch, allowed, self._runtime.recipe.unknown)[0]
        return routings

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
            self._refuse_headless(self._allowed(sorted(named)))
        batches = self._with_routings(inputs, routings, batch_size)
        return [one for rows, own in batches for one in self._answer_routed(self._runtime.batch(rows), own, {}, top)]

    def embed(self, inputs: Any, *, task: str | Sequence[str] | None = None, batch_size: int = 32) -> Tensor:
        """Features (inputs, width) of the second pass."""
        allowed = self._allowed(task)
        found = []
        for rows in self._readable(several(inputs), batch_size):
            batch = self._runtime.batch(rows)
            routings = self._routings_of(batch, allowed, "input", Unknown())[0]
            output, order = self._second_pass(batch, routings)
            found.append(features(output, _reordered(batch, order))[torch.argsort(order)].cpu())
        return torch.cat(found) if found else torch.empty(0)

    def activations(self, inputs: Any, *, batch_size: int = 32, first_pass: FirstPass | None = None) -> list[Tensor]:
        """What the voters see: for each voter one activation of the first pass for each input (inputs, width).

        Args:
            inputs: what to look at.
            batch_size: how many inputs run at once.
            first_pass: another pass with voters of its own, instead of the one that decides.
        """
        run = first_pass or self._runtime.first_pass
        found = [
            [seen.pooled() for seen in run(self._runtime.batch(rows))]
            for rows in self._readable(several(inputs), batch_size)
        ]
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def read(self, item: Any) -> dict[str, Tensor]:
        """One input as the tensors that the backbone takes; every other method takes them in its place.

        Raises:
            InputError: it cannot be read as an input of this model.
        """
        return self._runtime.reader.row(item)

    # Steps

    def _refuse_headless(self, tasks: list[int]) -> None:
        """Raise an error if none of the tasks has a head."""
        without = [self.tasks[t] for t in tasks if self.tasks[t] not in self._runtime.heads]
        if len(without) == len(tasks):
            others = "`generate`, `embed`" if language_class(self._runtime.base.config) else "`embed`"
            raise InputError(f"{', '.join(without)}: no head, so there is no label to answer. Use {others} or `route`.")

    def _answer(self, rows: list[Any], allowed: list[int], route: str, top: int, unknown: Unknown) -> list[Prediction]:
        batch = self._runtime.batch(rows)
        routings, timings = self._routings_of(batch, allowed, route, unknown)
        answer = self._answer_unclear if route == "input" else self._answer_routed
        found = answer(batch, routings, timings, top)
        self._runtime.refuse_damage()  # what was computed while a file changed is no answer
        return found

    def _spread(self, routings: list[Routing]) -> list[tuple[int, Routing]]:
        """The routings, with several of an unclear input."""
        return spread(routings, self._runtime.recipe.router.unsure, self._runtime.candidates)

    def _settled(self, batch: dict[str, Tensor], routings: list[Routing]) -> list[Routing]:
        """The routings, with that of an unclear input as its candidates' heads decide."""
        if len(self._spread(routings)) == len(routings):
            return routings
        answers = self._answer_unclear(batch, routings, {}, 1)
        return [answer.routing or routing for answer, routing in zip(answers, routings, strict=True)]

    def _answer_unclear(
        self, batch: dict[str, Tensor], routings: list[Routing], timings: dict[str, float], top: int
    ) -> list[Prediction]:
        """Answers of which an unclear input's is the best of several candidates'."""
        runtime, asked = self._runtime, self._spread(routings)
        if len(asked) == len(routings):
            return self._answer_routed(batch, routings, timings, top)
        inputs = [i for i, _ in asked]
        answers = self._answer_routed(_reordered(batch, torch.tensor(inputs)), [r for _, r in asked], timings, top)
        timings["inputs"] = len(routings)
        return settle(zip(inputs, answers, strict=True), runtime.recipe.router.confidence)

    def _answer_routed(
        self, batch: dict[str, Tensor], routings: list[Routing], timings: dict[str, float], top: int
    ) -> list[Prediction]:
        known = [i for i, routing in enumerate(routings) if routing.selected]
        predictions = [Prediction(None, routing=routing) for routing in routings]
        if known:
            chosen = [routings[i] for i in known]
            part = batch if len(known) == len(routings) else {k: v[torch.tensor(known)] for k, v in batch.items()}
            began = time.perf_counter()
            output, order = self._second_pass(part, chosen, for_heads=True)
            timings["second pass"] = milliseconds(began)
            began = time.perf_counter()
            for i, prediction in zip(known, self._heads(output, order, part, chosen, top), strict=True):
                predictions[i] = prediction
            timings["heads"] = milliseconds(began)
        timings["inputs"] = len(routings)
        return [replace(p, timings=timings) for p in predictions]

    def _second_pass(
        self, batch: dict[str, Tensor], routings: list[Routing], *, for_heads: bool = False
    ) -> tuple[Any, Tensor]:
        """The backbone's output for the inputs sorted by selected set, and the order they were sorted to.

        What heads do not read of it may be missing if it is for them alone.
        """
        runtime = self._runtime
        groups = self._evened(self._groups(routings))
        order = [i for _, members in groups for i in members]
        stops = accumulate(len(members) for _, members in groups)
        parts = [
            Segment(changes, stop - len(members), stop) for (changes, members), stop in zip(groups, stops, strict=True)
        ]
        runtime.cache.use([part.changes for part in parts])
        index = torch.tensor(order)
        sorted_batch = _reordered(batch, index)
        shell = next((h for h in runtime.heads.values() if isinstance(h, ShellHead)), None)
        call = (
            shell.backbone_call(sorted_batch, runtime.base) if shell else with_decoder_start(sorted_batch, runtime.base)
        )
        return runtime.second_pass(call, Segments(tuple(parts), len(order), for_heads)), index

    def _generations(
        self, generator: Generator, rows: list[Row], allowed: list[int], unknown: Unknown
    ) -> list[Generation]:
        """Texts for a batch of prompts, group by group of one selected set."""
        routings, timings = self._routings_of(self._runtime.batch(rows), allowed, "input", unknown)
        began = time.perf_counter()
        found = self._written(generator, rows, routings)
        timings |= {"generation": milliseconds(began), "inputs": len(rows)}
        return [replace(generation, timings=timings) for generation in found]

    def _written(self, generator: Generator, rows: list[Row], routings: list[Routing]) -> list[Generation]:
        found = [Generation(None, routing=routing) for routing in routings]
        for changes, members in self._groups(routings):
            written = generator([rows[i] for i in members], [routings[i] for i in members], changes)
            for i, generation in zip(members, written, strict=True):
                found[i] = generation
        return found

    def _heads(
        self, output: Any, order: Tensor, batch: dict[str, Tensor], routings: list[Routing], top: int
    ) -> list[Prediction]:
        """Every head of every selected set on the rows that selected it, then the best label of each input."""
        count = len(routings)
        inputs = _reordered(batch, order)
        logits: list[dict[str, Tensor]] = [{} for _ in range(count)]
        for task, head in self._runtime.heads.items():
            rows = [p for p, i in enumerate(order.tolist()) if task in routings[i].selected]
            if not rows:
                continue
            index = torch.tensor(rows)
            values = head(take_rows(output, index, count), {k: v[index] for k, v in inputs.items()}).cpu()
            for position, row in zip(rows, values, strict=True):
                logits[int(order[position])][task] = row
        labels, problems, options = self._runtime.labels, self.problems, self._runtime.recipe.answer
        return [
            make_prediction(found, labels, problems, routing.weights, options, top, routing)
            for routing, found in zip(routings, logits, strict=True)
        ]


def _marked(answer: Any, row: Row) -> Any:
    """The answer, which says so where the end of its text was left out."""
    return replace(answer, truncated=True) if isinstance(row, CutRow) else answer


def _reordered(batch: dict[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    return {k: v[order] for k, v in batch.items()}
