"""A first pass that is run to its end: the heads read its output, and there is no second pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from massmerge.errors import InputError
from massmerge.model.answers import Routing
from massmerge.model.core import Core
from massmerge.model.route.stages import Look, Stages, milliseconds
from massmerge.model.second_pass.sets import Passed
from massmerge.model.speed.lengths import length_groups, trimmed
from massmerge.model.speed.parallel import parts_of, run_parts
from massmerge.model.trees import join_rows, take_rows
from massmerge.routing.activation import Activation, joined


class OnePass:
    """One forward pass of the base for a batch: what the voters of all looks see of it, and its output.

    Args:
        core: the base and heads.
        stages: whose looks watch the pass.
        batch: the inputs.

    Raises:
        InputError: the first pass is not the base's, so its output is not what a head could read.
    """

    def __init__(self, core: Core, stages: Stages, batch: dict[str, Tensor]) -> None:
        if not OnePass.possible(core, stages):
            raise InputError(
                "passes=1 answers with the base's features, and the first pass of this bundle runs another model (a tuned "
                "router, or `first_pass: fixed`). Leave it out, or load with router='projection'."
            )
        self._core, self._batch = core, batch
        self._looks: list[Look] = [stages.first, *([stages.second] if stages.second else [])]
        began = time.perf_counter()
        self._output, self._seen = self._run()
        self.milliseconds = milliseconds(began)

    @staticmethod
    def possible(core: Core, stages: Stages) -> bool:
        """Whether the first pass is the base's, so that heads can read its output."""
        return stages.first.first_pass.model is core.base

    def seen(self, look: Look, rows: Sequence[int]) -> list[Activation]:
        """What the voters of a look see of the inputs at some positions."""
        index = torch.tensor(list(rows))
        return [activation.of(index) for activation in self._seen[self._looks.index(look)]]

    def passed(self, rows: Sequence[int], routings: Sequence[Routing]) -> Passed:
        """The base's output for the inputs at some positions, as a second pass gives it; no set changes it."""
        index = torch.tensor(list(rows))
        output = take_rows(self._output, index, self._count)
        return Passed(output, {name: t[index] for name, t in self._batch.items()}, list(range(len(index))))

    @property
    def _count(self) -> int:
        return next(iter(self._batch.values())).shape[0]

    def _run(self) -> tuple[Any, list[list[Activation]]]:
        """Output and activations in the order of the batch; texts run in groups of similar length."""
        groups = [] if getattr(self._core.base.config, "is_encoder_decoder", False) else length_groups(self._batch)
        if len(groups) < 2:
            everything = list(range(self._count))
            groups = [everything[part] for part in parts_of(self._count, self._core.base.device)]
        found = run_parts(self._part, groups)
        places = torch.argsort(torch.tensor([row for group in groups for row in group]))
        output = take_rows(join_rows([output for output, _ in found]), places, self._count)
        seen = [
            [joined(list(voter)).of(places) for voter in zip(*(parts[i] for _, parts in found), strict=True)]
            for i in range(len(self._looks))
        ]
        return output, seen

    @torch.inference_mode()
    def _part(self, rows: list[int]) -> tuple[Any, list[list[Activation]]]:
        inputs = trimmed(self._batch, rows)
        with ExitStack() as stack:
            watched = [stack.enter_context(look.first_pass.watching(inputs)) for look in self._looks]
            output = self._core.base(**self._core.call(inputs))
            return output, [seen() for seen in watched]
