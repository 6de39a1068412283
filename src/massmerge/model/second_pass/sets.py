"""The sets of tasks that inputs select: the update of each, and batches that several of them share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from massmerge.bundle.factors import TaskTensors
from massmerge.checkpoints.skeleton import Slot
from massmerge.model.answers import Routing
from massmerge.model.core import Core
from massmerge.model.heads.language import LanguageModels
from massmerge.model.second_pass.cache import DenseCache
from massmerge.model.second_pass.install import SecondPass
from massmerge.model.second_pass.segments import Segment, Segments
from massmerge.model.second_pass.updates import SetChanges
from massmerge.model.speed.lengths import length_groups, trimmed
from massmerge.model.speed.parallel import even_order, parts_of, run_parts
from massmerge.model.trees import join_rows
from massmerge.recipe import MergeKind

_KNOWN_SETS = 256  # sets whose small cores and norms are kept at hand
_T = TypeVar("_T")


class Passed(NamedTuple):
    """What the second pass gives for a batch."""

    output: Any
    """The backbone's, for the inputs sorted by their sets."""
    batch: dict[str, Tensor]
    """The inputs so sorted."""
    order: list[int]
    """Where each of them was before."""

    def back(self, values: Sequence[_T]) -> list[_T]:
        """Values of the sorted inputs, in the order of the batch that was handed in."""
        found = dict(zip(self.order, values, strict=True))
        return [found[i] for i in range(len(found))]


class Sets:
    """The update of each selected set, and the second pass that runs with them.

    Args:
        core: the base and heads.
        bundle: the bundle's folder.
        tensors: of the tasks.
        second_pass: the base's modules with the updates of sets.
        cache: dense weights of sets that are used often.
        slots: kind and shape of every tensor.
        merge: how the tasks of a set are merged.
    """

    def __init__(
        self,
        core: Core,
        bundle: Path,
        tensors: TaskTensors,
        second_pass: SecondPass,
        cache: DenseCache,
        slots: dict[str, Slot],
        merge: MergeKind,
    ) -> None:
        self.bundle, self.tensors, self.second_pass, self.cache, self.merge = bundle, tensors, second_pass, cache, merge
        self._core, self._slots, self._state = core, slots, dict(core.base.state_dict())
        self._known: OrderedDict[tuple[int, ...], SetChanges] = OrderedDict()
        self._lock = threading.Lock()

    def merged_by(self, merge: MergeKind) -> Sets:
        """The same sets, merged in another way."""
        if merge == self.merge:
            return self
        return Sets(self._core, self.bundle, self.tensors, self.second_pass, self.cache, self._slots, merge)

    @cached_property
    def language_models(self) -> LanguageModels:
        """The language model of each set.

        Raises:
            InputError: the base does not generate.
        """
        return LanguageModels(self._core.base, self.second_pass, self.bundle, self._core.tasks)

    def changes(self, tasks: tuple[int, ...]) -> SetChanges:
        """The changes of a set, made once."""
        with self._lock:
            if tasks not in self._known:
                self._known[tasks] = self._make(tasks)
                if len(self._known) > _KNOWN_SETS:
                    self._known.popitem(last=False)
            self._known.move_to_end(tasks)
            return self._known[tasks]

    def _make(self, tasks: tuple[int, ...], weights: list[float] | None = None) -> SetChanges:
        factors, whole = self.tensors.factors, self.tensors.whole
        return SetChanges(tasks, factors, whole, self._state.get, self.merge, weights, self._slots)

    def groups(self, routings: Sequence[Routing]) -> list[tuple[SetChanges, list[int]]]:
        """The selected sets, each with the positions of the inputs that it was selected for; weighted ones stand alone."""
        names = self._core.tasks
        members: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for i, routing in enumerate(routings):
            tasks = tuple(sorted(names.index(task) for task in routing.selected))
            alone = self.merge == "weighted" and len(tasks) > 1
            members.setdefault((tasks, i if alone else -1), []).append(i)
        return [
            (self.changes(tasks) if i < 0 else self._make(tasks, [routings[i].weights[names[t]] for t in tasks]), found)
            for (tasks, i), found in sorted(members.items())
            if tasks
        ]

    def forward(self, batch: dict[str, Tensor], routings: Sequence[Routing], *, for_heads: bool = False) -> Passed:
        """The second pass of a batch, each input with the set that its routing selects.

        What heads do not read of the output may be missing if it is for them alone. Texts run in groups of similar length,
        and the output has zeros where there is padding.
        """
        rows = [] if getattr(self._core.base.config, "is_encoder_decoder", False) else length_groups(batch)
        if len(rows) < 2:
            return self._forward(batch, routings, for_heads=for_heads)

        def run(own: list[int]) -> Passed:
            """The second pass of inputs of similar length."""
            return self._forward(trimmed(batch, own), [routings[i] for i in own], for_heads=for_heads)

        passed = run_parts(run, rows)
        order = [own[i] for own, part in zip(rows, passed, strict=True) for i in part.order]
        return Passed(join_rows([part.output for part in passed]), trimmed(batch, order), order)

    def _forward(self, batch: dict[str, Tensor], routings: Sequence[Routing], *, for_heads: bool) -> Passed:
        """The same for texts of one length, or images."""
        groups = self._evened(self.groups(routings))
        order = [i for _, members in groups for i in members]
        stops = accumulate(len(members) for _, members in groups)
        parts = [
            Segment(changes, stop - len(members), stop) for (changes, members), stop in zip(groups, stops, strict=True)
        ]
        self.cache.use([part.changes for part in parts])
        given = {name: tensor[torch.tensor(order)] for name, tensor in batch.items()}
        segments = Segments(tuple(parts), len(order), for_heads)
        return Passed(self.second_pass(self._core.call(given), segments), given, order)

    def _evened(self, groups: list[tuple[SetChanges, list[int]]]) -> list[tuple[SetChanges, list[int]]]:
        """Groups in an order that gives every core as much to do: rows go through a thin product for each task of their set.

        To have a task's factors at hand takes as long as one row more does.
        """
        rows = [len(members) for _, members in groups]
        costs = [len(changes.tasks) * (len(members) + 1) for changes, members in groups]
        parts = len(parts_of(sum(rows), self._core.base.device))
        return [groups[i] for i in even_order(rows, costs, parts)] if parts > 1 else groups
