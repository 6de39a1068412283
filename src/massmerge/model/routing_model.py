"""The half of a model that names tasks: one pass up to the last voting site, and no answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Self

from torch import Tensor

from massmerge.model.answers import Routing, clear
from massmerge.model.core import Answering, Core
from massmerge.model.inputs import several
from massmerge.model.route.stages import Stages, Watch
from massmerge.recipe import Unknown
from massmerge.routing import Site
from massmerge.routing.sessions import Keys, SessionKeys, Sessions, all_together, session_batches


class RoutingModel(Answering):
    """Finds the tasks of inputs. Safe to use from several threads.

    Args:
        core: the base and what reads inputs for it.
        stages: what finds the tasks of an input.
    """

    def __init__(self, core: Core, stages: Stages) -> None:
        super().__init__(core)
        self._stages = stages

    @property
    def stages(self) -> Stages:
        """What finds the tasks of an input: voters, routers, looks."""
        return self._stages

    @property
    def voters(self) -> list[str]:
        """The sites and tokens that decide, such as `M0.mean`."""
        return [voter.name for voter in self.stages.voters]

    @property
    def top_k(self) -> int:
        """Most tasks that a selected set holds: also what `top_k: auto` of a recipe comes to."""
        return self.stages.top_k

    @property
    def sites(self) -> list[Site]:
        """Every place where inputs can be routed, in the order of a forward pass."""
        return list(self.stages.sites)

    def watched(self, watch: Watch) -> Self:
        """The same model, which shows every batch that it routes to `watch`, with what the voters see of it."""
        made = copy(self)
        made._stages = replace(self._stages, watch=watch)
        return made

    def read(self, item: Any) -> dict[str, Tensor]:
        """One input as the tensors that the backbone takes; every other method takes them in its place.

        Raises:
            InputError: it cannot be read as an input of this model.
        """
        return self.core.reader.row(item)

    def route(
        self,
        inputs: Any,
        *,
        task: str | Sequence[str] | None = None,
        batch_size: int = 32,
        unknown: Unknown | dict[str, float] | None = None,
        session: Keys = None,
        memory: Sessions | None = None,
    ) -> list[Routing]:
        """Residual, weight and selected set of each input; nothing is answered.

        An unclear image is decided by the heads of several candidates in `predict`, which are not asked here.

        Args:
            inputs: what to route.
            task: the tasks to choose among; all by default.
            batch_size: how many inputs run at once.
            unknown: when to select no task, instead of what the recipe says.
            session: a key for all inputs, or one for each, as in `predict`.
            memory: remembers sessions, as in `predict`.

        Raises:
            InputError: an unknown task, or an input that cannot be read.
        """
        options: dict[str, Any] = {"task": task, "batch_size": batch_size, "unknown": unknown, "memory": memory}
        return all_together(several(inputs), session, partial(self._routed, **options))

    def _routed(
        self, inputs: Any, *, task: Any, batch_size: int, unknown: Any, session: Keys, memory: Sessions | None
    ) -> Iterator[Routing]:
        """Routings, one batch after the other."""
        choice = self.stages.choice(self.core.positions(task), self.stages.limits(unknown))
        memory = Sessions() if memory is None else memory
        for keys, items in session_batches(inputs, session, batch_size):
            for batch in self.core.batches(items, batch_size):
                own = None if session is None else SessionKeys(memory, keys)
                for routing in self.stages.look(batch, choice, session=own)[0]:
                    yield clear(routing, choice.unknown.confidence)
