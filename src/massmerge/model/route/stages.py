"""How the tasks of an input are found, stage by stage; each stage sees only the inputs that the one before leaves unclear.

| stage | runs for | costs each of them |
|---|---|---|
| given | every input, where the call names one task | nothing |
| first look | every other input | a pass up to the last voter: half of the blocks for images, nearly all for text |
| second look | images whose lead is below `unsure`, or whose task has similar ones | a pass of all blocks |
| candidates | images whose lead is still below `unsure` | a second pass and a head for each candidate |

For text a recipe may ask for candidates, too. Looks need a batch alone; candidates need answers, so whoever answers asks
`spread` for them and `settle` for the best.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import ValidationError
from torch import Tensor

from massmerge.errors import InputError
from massmerge.model.answers import Prediction, Routing, typical_or_none
from massmerge.model.route.candidates import settle, spread
from massmerge.model.route.decide import Choice, Votes, cast_votes, count_votes, with_last_turns
from massmerge.model.route.first_pass import FirstPass, Voter
from massmerge.recipe import RouterOptions, Unknown
from massmerge.routing import Activation, Site
from massmerge.routing.confidence import ConfidenceRule, head_evidence
from massmerge.routing.router import Router
from massmerge.routing.sessions import SessionKeys
from massmerge.routing.typicality import Typicality

BATCH_PROBES = 4  # inputs that decide for a whole batch of one task
_CANDIDATES = 4  # tasks that answer an unclear image


class Look:
    """A pass up to some voters, and what scores what they see.

    Args:
        first_pass: a pass up to the last of the voters.
        make_router: makes the router, when it is needed for the first time.
    """

    def __init__(self, first_pass: FirstPass, make_router: Callable[[], Router]) -> None:
        self.first_pass, self._make = first_pass, make_router
        self._router: Router | None = None
        self._lock = threading.Lock()

    @property
    def voters(self) -> list[Voter]:
        """Who votes."""
        return self.first_pass.voters

    @property
    def router(self) -> Router:
        """What scores what the voters see."""
        with self._lock:
            if self._router is None:
                self._router = self._make()
            return self._router


class SecondLook(Look):
    """Voters of all blocks, for inputs of which those of the first blocks are not sure.

    Args:
        first_pass: as in `Look`.
        make_router: as in `Look`.
        kin: which tasks look alike to the first blocks (T, T), which can then not be sure of either.
        unsure: an input whose best task leads the next by less is looked at again.
    """

    def __init__(self, first_pass: FirstPass, make_router: Callable[[], Router], kin: Tensor, unsure: float) -> None:
        super().__init__(first_pass, make_router)
        self._kin, self._unsure = kin, unsure

    def needed(self, leads: Sequence[float | None], best: Sequence[int], allowed: Sequence[int]) -> list[int]:
        """Positions of the inputs that the first blocks are not sure of.

        Args:
            leads: how far the best task of each is ahead; None where there is no other.
            best: which task that is.
            allowed: the tasks that it was chosen among.
        """
        mistaken = self._kin[:, list(allowed)].any(1).tolist()
        return [
            i
            for i, (lead, task) in enumerate(zip(leads, best, strict=True))
            if lead is not None and (lead < self._unsure or mistaken[task])
        ]


Seen = Callable[[Look, list[int]], list[Activation]]
"""What the voters of a look have seen of the inputs at some positions."""


@dataclass(frozen=True)
class Stages:
    """The stages of a loaded bundle.

    Attributes:
        tasks: names of all tasks.
        sites: every place where inputs can be routed, in the order of a forward pass.
        options: how votes become a decision.
        unknown: when no task is chosen.
        first: the first look.
        rule: how evidence becomes confidence.
        second: the second look, where there is one.
        typical: how typical an input is of the tasks, where that was fitted.
        targets: for each task the first one with the same expert; none where the router can tell such tasks apart.
        watch: is shown every batch that is looked at, with what the voters of the first look see of it.
    """

    tasks: list[str]
    sites: list[Site]
    options: RouterOptions
    unknown: Unknown
    first: Look
    rule: ConfidenceRule
    second: SecondLook | None = None
    typical: Typicality | None = None
    targets: list[int] | None = None
    watch: Watch | None = None

    @property
    def voters(self) -> list[Voter]:
        """Who votes at the first look."""
        return self.first.voters

    @property
    def top_k(self) -> int:
        """K: heads that were trained apart do not share a scale, so by default one task is chosen."""
        return 1 if self.options.top_k == "auto" else int(self.options.top_k)

    @property
    def candidates(self) -> int:
        """How many tasks answer an unclear input; sets of several tasks have several heads anyway."""
        if self.top_k > 1:
            return 1
        wanted = self.options.candidates
        return (_CANDIDATES if self.second else 1) if wanted == "auto" else wanted

    def limits(self, unknown: Unknown | dict[str, float] | None) -> Unknown:
        """When to abstain: as the call says, else as the recipe does."""
        if unknown is None:
            return self.unknown
        try:
            return Unknown.model_validate(unknown)
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise InputError(
                f"unknown: {faults}. It takes lift (from 0), agreement, confidence and typicality (0 to 1)."
            ) from None

    def choice(self, allowed: list[int] | None = None, unknown: Unknown | None = None) -> Choice:
        """What is decided among: by default all tasks, with the recipe's limits."""
        everything = list(range(len(self.tasks)))
        limits = unknown or self.unknown
        return Choice(self.tasks, allowed or everything, self.options, self.top_k, limits, self.rule, self.targets)

    def route(
        self,
        batch: dict[str, Tensor],
        choice: Choice,
        by: str = "input",
        session: SessionKeys | None = None,
        seen: Seen | None = None,
    ) -> tuple[list[Routing], dict[str, float]]:
        """The routing of each input of a batch, and what it took in milliseconds; no head has been asked.

        Args:
            batch: the inputs.
            choice: what is decided among; a task that is given needs no look.
            by: `input`, or `batch` for one decision by the first inputs.
            session: the inputs' sessions, whose evidence is shared.
            seen: what voters have seen of the inputs at some positions, where a pass has been made already.
        """
        count = next(iter(batch.values())).shape[0]
        if len(choice.allowed) == 1:
            name = self.tasks[choice.allowed[0]]
            return [Routing({}, {name: 1.0}, [name], "none: the task was given", probabilities={name: 1.0})] * count, {}
        if by == "input":
            return self.look(batch, choice, session=session, seen=seen)
        first = {k: v[:BATCH_PROBES] for k, v in batch.items()}
        routings, timings = self.look(first, choice, shared=True, seen=seen)
        return routings * count, timings

    def look(
        self,
        batch: dict[str, Tensor],
        choice: Choice,
        *,
        shared: bool = False,
        session: SessionKeys | None = None,
        seen: Seen | None = None,
    ) -> tuple[list[Routing], dict[str, float]]:
        """The same by the looks, whatever was given; with `shared` one decision for all inputs."""
        count = next(iter(batch.values())).shape[0]
        passes, everything = 0.0, list(range(count))
        typical: list[Tensor] = []

        def votes(look: Look, rows: list[int], own: SessionKeys | None) -> Votes:
            """The votes of a look at some of the inputs."""
            nonlocal passes
            began = time.perf_counter()
            if seen is None:
                part = batch if len(rows) == count else {k: v[torch.tensor(rows)] for k, v in batch.items()}
                activations = look.first_pass(part)
            else:
                activations = seen(look, rows)
            passes += milliseconds(began)
            if look is self.first and self.watch is not None:
                self.watch(self, batch, activations)
            if look is self.first and self.typical is not None:
                typical.append(self.typical([a.pooled() for a in activations], choice.allowed))
            cast = cast_votes(look.voters, activations, look.router)
            if look is self.first and (turns := getattr(batch, "turns", None)):
                cast = with_last_turns(cast, turns[0], cast_votes(look.voters, look.first_pass(turns[1]), look.router))
            return cast if own is None else replace(cast, scores=own.memory.combined(look, own.keys, cast.scores))

        def again(unsure: list[int]) -> Votes:
            """The votes of the second look at the inputs that are unsure."""
            assert self.second is not None
            own = None if session is None else session.of(unsure)
            return votes(self.second, everything if shared else unsure, own)

        began = time.perf_counter()
        routings = self.decide(votes(self.first, everything, session), again, choice, shared=shared)
        for found in typical:
            values = [float(found.mean())] if shared else found.tolist()
            routings = [typical_or_none(r, v, choice.unknown) for r, v in zip(routings, values, strict=True)]
        return routings, {"first pass": round(passes, 3), "routing": round(milliseconds(began) - passes, 3)}

    def decide(
        self, first: Votes, again: Callable[[list[int]], Votes] | None, choice: Choice, *, shared: bool = False
    ) -> list[Routing]:
        """Routings by the votes of the first look, and by those of the second where that is not sure.

        Args:
            first: what the voters of the first look say.
            again: gives what those of the second say of the inputs at some positions, or of all inputs where the decision
                is shared; none to be content with the first.
            choice: what is decided among.
            shared: make one decision for all inputs.
        """
        routings = count_votes(first, choice, shared=shared)
        if self.second is None or again is None:
            return routings
        best = [self.tasks.index(min(r.residuals, key=r.residuals.__getitem__)) for r in routings]
        unsure = self.second.needed([r.margin for r in routings], best, choice.allowed)
        if unsure:
            for i, routing in zip(unsure, count_votes(again(unsure), choice, shared=shared), strict=True):
                routings[i] = routing
        return routings

    def spread(self, routings: Sequence[Routing]) -> list[tuple[int, Routing]]:
        """Each input's position with its routing; an unclear one once for each of its candidates."""
        return spread(routings, self.options.unsure, self.candidates)

    def settle(self, asked: Iterable[tuple[int, Prediction]]) -> list[Prediction]:
        """The prediction of each input, from those of its candidates, all of one input one after the other."""
        return settle(asked, self.options.confidence, head_evidence(self.options.confidence, self.rule))


def milliseconds(began: float) -> float:
    """Time since a moment of `time.perf_counter`."""
    return round((time.perf_counter() - began) * 1000, 3)


Watch = Callable[[Stages, dict[str, Tensor], list[Activation]], None]
"""Is shown batches that are routed."""
