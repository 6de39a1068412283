"""A loaded bundle: takes inputs without a task name, finds the task and answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from massmerge.answers import Prediction, Routing, rank_answers
from massmerge.decision import Choice, decide
from massmerge.errors import InputError
from massmerge.heads.runtime import ShellHead, features
from massmerge.recipe import Unknown
from massmerge.routing import Site
from massmerge.runtime import Runtime, load_runtime, with_decoder_start
from massmerge.subspace.segments import Segment, Segments
from massmerge.subspace.updates import SetChanges
from massmerge.trees import take_rows

_BATCH_PROBES = 4  # inputs that decide for a whole batch of one task


def load(
    path: str | Path,
    *,
    router: str | None = None,
    device: str = "auto",
    cache: str | int = 0,
    check: bool | Literal["background"] = "background",
) -> Model:
    """Load a bundle.

    Args:
        path: the bundle's folder.
        router: `projection`, or one that `mass calibrate` has fitted; the bundle's own choice by default.
        device: where to run, such as `cpu` or `cuda`; a GPU if there is one by default.
        cache: bytes (or `"512MB"`) for dense weights of sets that are used again and again; none by default.
        check: how files are compared with the manifest: names and sizes now and checksums in the `background`, so that the
            first answers need not wait and all calls fail as soon as damage is found; everything now (True); or nothing.

    Raises:
        InputError: not a bundle, or damaged.
    """
    return Model(load_runtime(Path(path), router=router, device=device, cache=cache, check=check))


class Model:
    """One backbone, many tasks. Safe to use from several threads."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order."""
        return list(self._runtime.tasks)

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Label names of each task that has a head."""
        return dict(self._runtime.labels)

    @property
    def shared_labels(self) -> list[list[str]]:
        """Groups of `task/label` that mean the same thing, as the recipe declares them."""
        return self._runtime.recipe.shared_labels

    @property
    def voters(self) -> list[str]:
        """The sites and tokens that decide, such as `M0.mean`."""
        return [voter.name for voter in self._runtime.voters]

    @property
    def sites(self) -> list[Site]:
        """Every place where inputs can be routed, in the order of a forward pass."""
        return list(self._runtime.sites)

    @property
    def takes_images(self) -> bool:
        """Whether inputs are images; text otherwise."""
        return self._runtime.reader.image

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
            on_error: whether an input that cannot be read stops everything or has its error in its row.

        Raises:
            InputError: an unknown task, an input that cannot be read, or tasks without heads.
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
        without = [self.tasks[t] for t in allowed if self.tasks[t] not in self._runtime.heads]
        if without:
            raise InputError(f"{', '.join(without)}: no head, so there is no label to answer. Use `embed` or `route`.")
        limits = self._runtime.recipe.unknown if unknown is None else _limits(unknown)
        if top < 1 or batch_size < 1:
            raise InputError("top and batch_size must be at least 1.")
        if route not in ("input", "batch"):
            raise InputError(f"route is 'input' or 'batch', not {route!r}.")
        for rows in self._batches(inputs, batch_size, on_error):
            good = [row for row in rows if not isinstance(row, Prediction)]
            answers = iter(self._answer(good, allowed, route, top, limits) if good else [])
            for row in rows:
                yield row if isinstance(row, Prediction) else next(answers)

    def route(self, inputs: Any, *, task: str | Sequence[str] | None = None, batch_size: int = 32) -> list[Routing]:
        """Only the first half: residual, weight and selected set of each input."""
        allowed = self._allowed(task)
        routings: list[Routing] = []
        for rows in self._batches(several(inputs), batch_size, "raise"):
            batch = self._runtime.batch(rows)
            routings += self._routed(batch, allowed, self._runtime.recipe.unknown)[0]
        return routings

    def embed(self, inputs: Any, *, task: str | Sequence[str] | None = None, batch_size: int = 32) -> Tensor:
        """Features (inputs, width) of the second pass."""
        allowed = self._allowed(task)
        found = []
        for rows in self._batches(several(inputs), batch_size, "raise"):
            batch = self._runtime.batch(rows)
            routings = self._routings_of(batch, allowed, "input", Unknown())[0]
            output, order = self._second_pass(batch, routings)
            found.append(features(output, _reordered(batch, order))[torch.argsort(order)].cpu())
        return torch.cat(found) if found else torch.empty(0)

    def activations(self, inputs: Any, *, batch_size: int = 32) -> list[Tensor]:
        """What the voters see: for each voter one activation of the first pass for each input (inputs, width)."""
        found = [
            [seen.pooled() for seen in self._runtime.first_pass(self._runtime.batch(rows))]
            for rows in self._batches(several(inputs), batch_size, "raise")
        ]
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def read(self, item: Any) -> dict[str, Tensor]:
        """One input as the tensors that the backbone takes; every other method takes them in its place.

        Raises:
            InputError: it cannot be read as an input of this model.
        """
        return self._runtime.reader.row(item)

    # Steps

    def _allowed(self, task: str | Sequence[str] | None) -> list[int]:
        """Positions of the tasks that may be chosen."""
        if task is None:
            return list(range(len(self.tasks)))
        names = [task] if isinstance(task, str) else list(task)
        unknown = [name for name in names if name not in self.tasks]
        if unknown or not names:
            wrong = f"no task {', '.join(map(repr, unknown))}" if unknown else "an empty list of tasks"
            raise InputError(f"{wrong}. There are {', '.join(self.tasks)}.")
        return [i for i, name in enumerate(self.tasks) if name in names]

    def _batches(self, inputs: Iterable[Any], size: int, on_error: str) -> Iterator[list[Any]]:
        """Rows of tensors, in batches; with `row`, a Prediction with the error where an input cannot be read."""
        items = iter(inputs)
        while chunk := list(islice(items, size)):
            rows: list[Any] = []
            for item in chunk:
                try:
                    if isinstance(item, Exception):
                        raise item
                    rows.append(self._runtime.reader.row(item))
                except InputError as error:
                    if on_error == "raise":
                        raise
                    rows.append(Prediction(None, error=str(error)))
            yield rows

    def _answer(self, rows: list[Any], allowed: list[int], route: str, top: int, unknown: Unknown) -> list[Prediction]:
        batch = self._runtime.batch(rows)
        routings, timings = self._routings_of(batch, allowed, route, unknown)
        known = [i for i, routing in enumerate(routings) if routing.selected]
        predictions = [Prediction(None, routing=routing) for routing in routings]
        if known:
            chosen = [routings[i] for i in known]
            part = batch if len(known) == len(rows) else {k: v[torch.tensor(known)] for k, v in batch.items()}
            began = time.perf_counter()
            output, order = self._second_pass(part, chosen)
            timings["second pass"] = _ms(began)
            began = time.perf_counter()
            for i, prediction in zip(known, self._heads(output, order, part, chosen, top), strict=True):
                predictions[i] = prediction
            timings["heads"] = _ms(began)
        timings["inputs"] = len(rows)
        return [replace(p, timings=timings) for p in predictions]

    def _routings_of(
        self, batch: dict[str, Tensor], allowed: list[int], route: str, unknown: Unknown
    ) -> tuple[list[Routing], dict[str, float]]:
        """Routings of a batch and what they took; a known task needs no first pass."""
        count = next(iter(batch.values())).shape[0]
        if len(allowed) == 1:
            name = self.tasks[allowed[0]]
            return [Routing({}, {name: 1.0}, [name], "none: the task was given")] * count, {}
        probes = batch if route == "input" else {k: v[:_BATCH_PROBES] for k, v in batch.items()}
        routings, timings = self._routed(probes, allowed, unknown, shared=route != "input")
        return (routings if route == "input" else routings * count), timings

    def _routed(
        self, batch: dict[str, Tensor], allowed: list[int], unknown: Unknown, *, shared: bool = False
    ) -> tuple[list[Routing], dict[str, float]]:
        """Routings by the first look, and by the closer one where that is not sure; what they took."""
        runtime, options = self._runtime, self._runtime.recipe.router
        choice = Choice(self.tasks, allowed, options, runtime.top_k, unknown)
        began = time.perf_counter()
        activations = runtime.first_pass(batch)
        timings = {"first pass": _ms(began)}
        began = time.perf_counter()
        routings = decide(activations, runtime.voters, runtime.routers, choice, shared=shared)
        timings["routing"] = _ms(began)
        closer = runtime.closer
        unsure = [i for i, r in enumerate(routings) if r.margin is not None and r.margin < options.unsure]
        if closer is None or not unsure:
            return routings, timings
        began = time.perf_counter()
        activations = closer.first_pass(batch if shared else {k: v[torch.tensor(unsure)] for k, v in batch.items()})
        timings["first pass"] += _ms(began)
        began = time.perf_counter()
        again = decide(activations, closer.voters, closer.routers, choice, shared=shared)
        timings["routing"] += _ms(began)
        for i, routing in zip(unsure, again, strict=True):
            routings[i] = routing
        return routings, timings

    def _second_pass(self, batch: dict[str, Tensor], routings: list[Routing]) -> tuple[Any, Tensor]:
        """The backbone's output for the inputs sorted by selected set, and the order they were sorted to."""
        runtime = self._runtime
        weighted = runtime.recipe.answer.merge == "weighted"
        keys = [
            (tuple(sorted(runtime.tasks.index(t) for t in r.selected)), i if weighted and len(r.selected) > 1 else -1)
            for i, r in enumerate(routings)
        ]
        order = sorted(range(len(keys)), key=lambda i: (keys[i], i))
        parts: list[Segment] = []
        for position, i in enumerate(order):
            if parts and keys[order[position - 1]] == keys[i]:
                parts[-1] = replace(parts[-1], stop=position + 1)
                continue
            parts.append(Segment(self._changes(keys[i][0], routings[i], weighted), position, position + 1))
        runtime.cache.use([part.changes for part in parts])
        index = torch.tensor(order)
        sorted_batch = _reordered(batch, index)
        shell = next((h for h in runtime.heads.values() if isinstance(h, ShellHead)), None)
        call = (
            shell.backbone_call(sorted_batch, runtime.base) if shell else with_decoder_start(sorted_batch, runtime.base)
        )
        return runtime.second_pass(call, Segments(tuple(parts), len(order))), index

    def _changes(self, tasks: tuple[int, ...], routing: Routing, weighted: bool) -> SetChanges:
        if weighted and len(tasks) > 1:
            weights = [routing.weights[self.tasks[t]] for t in tasks]
            return self._runtime.make_changes(tasks, weights)
        return self._runtime.changes(tasks)

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
        predictions = []
        for routing, found in zip(routings, logits, strict=True):
            answers = rank_answers(found, self._runtime.labels, routing.weights, self._runtime.recipe.answer, top)
            best = answers[0]
            predictions.append(Prediction(best.task, best.label, best.score, best.logit, answers[1:], routing))
        return predictions


def several(inputs: Any) -> Iterable[Any]:
    """One input as a list of one; a pair of strings given alone is two inputs, not a pair."""
    if isinstance(
        inputs, Mapping
    ):  # ready tensors; a tokenizer or image processor gives those of several inputs together
        tensors = {name: torch.as_tensor(value) for name, value in inputs.items()}
        several = {"input_ids": 2, "pixel_values": 4}
        if any(tensor.ndim == several.get(name) for name, tensor in tensors.items()):
            return [dict(zip(tensors, row, strict=True)) for row in zip(*tensors.values(), strict=True)]
        return [inputs]
    if isinstance(inputs, Tensor | np.ndarray):
        return [inputs] if inputs.ndim in (0, 2, 3) else list(inputs)
    single = isinstance(inputs, str | bytes | Path | Image.Image) or not isinstance(inputs, Iterable)
    return [inputs] if single else inputs


def _limits(unknown: Unknown | dict[str, float]) -> Unknown:
    try:
        return Unknown.model_validate(unknown)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise InputError(f"unknown: {faults}. It takes lift (from 0) and agreement (0 to 1).") from None


def _reordered(batch: dict[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    return {k: v[order] for k, v in batch.items()}


def _ms(began: float) -> float:
    return round((time.perf_counter() - began) * 1000, 3)
