"""What every answer begins with: inputs are read, routed one by one or together, and grouped by selected set."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from massmerge.checkpoints.backbone import language_class
from massmerge.errors import InputError
from massmerge.model.answers import Routing
from massmerge.model.inputs import Row, attempt
from massmerge.model.load import Runtime
from massmerge.model.route.decide import Choice, Router, Votes, cast_votes, decide
from massmerge.model.route.first_pass import FirstPass
from massmerge.model.second_pass.updates import SetChanges
from massmerge.model.speed.parallel import even_order, parts_of
from massmerge.recipe import ProblemType, Unknown
from massmerge.routing import Site

BATCH_PROBES = 4  # inputs that decide for a whole batch of one task


class Routed:
    """A loaded bundle as far as the selected set of each input."""

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
    def problems(self) -> dict[str, ProblemType]:
        """What the outputs of each task's head mean, in Hugging Face's words."""
        return {task: head.problem_type for task, head in self._runtime.heads.items()}

    @property
    def shared_labels(self) -> list[list[str]]:
        """Groups of `task/label` that mean the same thing, as the recipe declares them."""
        return self._runtime.recipe.shared_labels

    @property
    def voters(self) -> list[str]:
        """The sites and tokens that decide, such as `M0.mean`."""
        return [voter.name for voter in self._runtime.voters]

    @property
    def top_k(self) -> int:
        """Most tasks that a selected set holds: also what `top_k: auto` of a recipe comes to."""
        return self._runtime.top_k

    @property
    def sites(self) -> list[Site]:
        """Every place where inputs can be routed, in the order of a forward pass."""
        return list(self._runtime.sites)

    @property
    def writes(self) -> bool:
        """Whether tasks answer with text (`generate`): none has labels, and the base generates."""
        return not self._runtime.labels and language_class(self._runtime.base.config) is not None

    @property
    def takes_images(self) -> bool:
        """Whether inputs are images; text otherwise."""
        return self._runtime.reader.image

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

    def _limits(self, unknown: Unknown | dict[str, float] | None) -> Unknown:
        """When to abstain: as the call says, else as the recipe does."""
        if unknown is None:
            return self._runtime.recipe.unknown
        try:
            return Unknown.model_validate(unknown)
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise InputError(f"unknown: {faults}. It takes lift (from 0) and agreement (0 to 1).") from None

    def _batches(
        self, inputs: Iterable[Any], size: int, on_error: str, read: Callable[[Any], Row] | None = None
    ) -> Iterator[list[Row | InputError]]:
        """Rows of tensors, in batches; with `row`, the error itself where an input cannot be read."""
        if on_error not in ("raise", "row"):
            raise InputError(f"on_error is 'raise' or 'row', not {on_error!r}.")
        items, read = iter(inputs), read or self._runtime.reader.row
        while chunk := list(islice(items, size)):
            yield [attempt(read, item, on_error) for item in chunk]
            self._runtime.refuse_damage()  # what was computed while a file changed is no answer

    def _readable(
        self, inputs: Iterable[Any], size: int, read: Callable[[Any], Row] | None = None
    ) -> Iterator[list[Row]]:
        """Rows of tensors, in batches; an input that cannot be read is an error."""
        for rows in self._batches(inputs, size, "raise", read):
            yield [row for row in rows if not isinstance(row, InputError)]

    def _with_routings(
        self, inputs: Any, routings: Sequence[Routing], size: int, read: Callable[[Any], Row] | None = None
    ) -> Iterator[tuple[list[Row], list[Routing]]]:
        """Rows of tensors, in batches, each with the routings that were made for them."""
        at = 0
        for rows in self._readable(several(inputs), size, read):
            own = list(routings[at : at + len(rows)])
            if len(own) < len(rows):
                raise InputError(f"more inputs than routings ({len(routings)}): each input needs its own.")
            yield rows, own
            at += len(rows)

    def _routings_of(
        self, batch: dict[str, Tensor], allowed: list[int], route: str, unknown: Unknown
    ) -> tuple[list[Routing], dict[str, float]]:
        """Routings of a batch and what they took; a known task needs no first pass."""
        count = next(iter(batch.values())).shape[0]
        if len(allowed) == 1:
            name = self.tasks[allowed[0]]
            return [Routing({}, {name: 1.0}, [name], "none: the task was given")] * count, {}
        probes = batch if route == "input" else {k: v[:BATCH_PROBES] for k, v in batch.items()}
        routings, timings = self._routed(probes, allowed, unknown, shared=route != "input")
        return (routings if route == "input" else routings * count), timings

    def _routed(
        self, batch: dict[str, Tensor], allowed: list[int], unknown: Unknown, *, shared: bool = False
    ) -> tuple[list[Routing], dict[str, float]]:
        """Routings by the first look, and by the closer one where that is not sure; what they took."""
        runtime, closer = self._runtime, self._runtime.closer
        choice = Choice(self.tasks, allowed, runtime.recipe.router, runtime.top_k, unknown)
        passes = 0.0

        def look(first_pass: FirstPass, routers: Callable[[], list[Router]], rows: dict[str, Tensor]) -> Votes:
            nonlocal passes
            began = time.perf_counter()
            activations = first_pass(rows)
            passes += milliseconds(began)
            return cast_votes(activations, routers())

        def look_closer(unsure: list[int]) -> Votes:
            assert closer is not None
            rows = batch if shared else {k: v[torch.tensor(unsure)] for k, v in batch.items()}
            return look(closer.first_pass, lambda: closer.routers, rows)

        began = time.perf_counter()
        first = look(runtime.first_pass, lambda: runtime.routers, batch)
        routings = decide(first, runtime.voters, closer, look_closer, choice, shared=shared)
        return routings, {"first pass": round(passes, 3), "routing": round(milliseconds(began) - passes, 3)}

    def _groups(self, routings: list[Routing]) -> list[tuple[SetChanges, list[int]]]:
        """The selected sets, each with the positions of the inputs that it was selected for; weighted ones stand alone."""
        weighted = self._runtime.recipe.answer.merge == "weighted"
        members: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for i, routing in enumerate(routings):
            tasks = tuple(sorted(self._runtime.tasks.index(t) for t in routing.selected))
            members.setdefault((tasks, i if weighted and len(tasks) > 1 else -1), []).append(i)
        return [
            (self._changes(key[0], routings[found[0]], weighted), found)
            for key, found in sorted(members.items())
            if key[0]
        ]

    def _evened(self, groups: list[tuple[SetChanges, list[int]]]) -> list[tuple[SetChanges, list[int]]]:
        """Groups in an order that gives every core as much to do: rows go through a thin product for each task of their set.

        To have a task's factors at hand takes as long as one row more does.
        """
        rows = [len(members) for _, members in groups]
        costs = [len(changes.tasks) * (len(members) + 1) for changes, members in groups]
        parts = len(parts_of(sum(rows), self._runtime.base.device))
        return [groups[i] for i in even_order(rows, costs, parts)]

    def _changes(self, tasks: tuple[int, ...], routing: Routing, weighted: bool) -> SetChanges:
        if weighted and len(tasks) > 1:
            weights = [routing.weights[self.tasks[t]] for t in tasks]
            return self._runtime.make_changes(tasks, weights)
        return self._runtime.changes(tasks)


def several(inputs: Any) -> Iterable[Any]:
    """One input as a list of one; a pair of strings given alone is two inputs, not a pair."""
    if isinstance(
        inputs, Mapping
    ):  # ready tensors; a tokenizer or image processor gives those of several inputs together
        tensors = {name: torch.as_tensor(value) for name, value in inputs.items()}
        several = {"input_ids": 2, "pixel_values": 4}
        if any(tensor.ndim == several.get(name) for name, tensor in tensors.items()):
            if len({len(tensor) for tensor in tensors.values()}) > 1:
                shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
                raise InputError(f"tensors of different numbers of inputs: {shapes}. All must have as many rows.")
            return [dict(zip(tensors, row, strict=True)) for row in zip(*tensors.values(), strict=True)]
        return [inputs]
    if isinstance(inputs, Tensor | np.ndarray):
        return [inputs] if inputs.ndim in (0, 2, 3) else list(inputs)
    single = isinstance(inputs, str | bytes | Path | Image.Image) or not isinstance(inputs, Iterable)
    return [inputs] if single else inputs


def milliseconds(began: float) -> float:
    """Time since a moment of `time.perf_counter`."""
    return round((time.perf_counter() - began) * 1000, 3)
