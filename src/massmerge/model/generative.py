"""What a loaded bundle writes: texts in answer to prompts that come without a task name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from massmerge.errors import InputError
from massmerge.model.answers import Generation, Routing, answered, clear, or_raised
from massmerge.model.chat import prompts_of
from massmerge.model.core import Core
from massmerge.model.decode import Piece, StepDecoder
from massmerge.model.generate import Generator
from massmerge.model.inputs import Row, several
from massmerge.model.route.decide import Choice
from massmerge.model.route.stages import Stages, milliseconds
from massmerge.model.routing_model import RoutingModel
from massmerge.model.second_pass.sets import Sets
from massmerge.model.streams import TextStream
from massmerge.recipe import Unknown
from massmerge.routing.sessions import Keys, SessionKeys, Sessions, all_together, session_batches


class Generative(RoutingModel):
    """A loaded bundle, as far as it writes.

    Args:
        core: the base, the heads, and what reads inputs for them.
        stages: what finds the tasks of an input.
        sets: what answers with the tasks that were found.
    """

    def __init__(self, core: Core, stages: Stages, sets: Sets) -> None:
        super().__init__(core, stages)
        self._sets = sets

    @property
    def sets(self) -> Sets:
        """The selected sets: their updates, and the second pass that runs with them."""
        return self._sets

    def generate(
        self,
        prompts: Any = None,
        *,
        messages: Sequence[Any] | None = None,
        task: str | Sequence[str] | None = None,
        batch_size: int = 8,
        unknown: Unknown | dict[str, float] | None = None,
        session: Keys = None,
        memory: Sessions | None = None,
        on_error: Literal["raise", "row"] = "raise",
        **options: Any,
    ) -> list[Generation]:
        """Write an answer to each prompt, for bundles of encoder-decoders and decoders; prompts are routed one by one.

        Args:
            prompts: texts, conversations, or what else `predict` takes.
            messages: instead, the messages of one conversation, or of several: mappings of `role` and `content`.
            task: as in `predict`.
            batch_size: how many prompts run at once.
            unknown: as in `predict`.
            session: as in `predict`: prompts of one key, such as those of one conversation, are routed together.
            memory: as in `predict`.
            on_error: as in `predict`.
            options: those of transformers' `generate`, such as `max_new_tokens` (64 by default) and `num_beams`.

        Raises:
            InputError: a bundle that generates nothing, a task that answers with labels, or an option that there is not.
        """
        given: dict[str, Any] = {"task": task, "batch_size": batch_size, "unknown": unknown, "memory": memory}
        write = partial(self.generate_many, on_error=on_error, **given, **options)
        return all_together(several(prompts_of(prompts, messages)), session, write)

    def generate_many(
        self,
        prompts: Iterable[Any],
        *,
        task: str | Sequence[str] | None = None,
        batch_size: int = 8,
        unknown: Unknown | dict[str, float] | None = None,
        session: Keys = None,
        memory: Sessions | None = None,
        on_error: Literal["raise", "row"] = "raise",
        **options: Any,
    ) -> Iterator[Generation]:
        """As `generate`, one batch at a time: memory does not grow with the number of prompts.

        Of a session, a prompt knows those of its own batch and earlier ones; keep the prompts of a session together.
        """
        choice = self.stages.choice(self.core.positions(task), self.stages.limits(unknown))
        generator = self._generator(choice, options)
        memory = Sessions() if memory is None else memory
        for keys, items in session_batches(prompts, session, batch_size):
            for rows in self.core.rows(items, batch_size, on_error, generator.read):
                good = [key for key, row in zip(keys, rows, strict=True) if not isinstance(row, InputError)]
                own = None if session is None else SessionKeys(memory, good)
                write = partial(self._generations, generator, choice=choice, session=own)
                for answer in answered(rows, write, Generation):
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
        generator = self._generator(self.stages.choice(), options)
        batches = self._with_routings(prompts, routings, batch_size, generator.read)
        return [text for rows, own in batches for text in generator(rows, own)]

    def generate_pieces(
        self,
        prompts: Any,
        *,
        task: str | Sequence[str] | None = None,
        batch_size: int = 8,
        unknown: Unknown | dict[str, float] | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, Piece]]:
        """The texts of many prompts while they are written: the position of a prompt, and what its text grows by."""
        choice = self.stages.choice(self.core.positions(task), self.stages.limits(unknown))
        generator = self._generator(choice, options)
        at = 0
        for rows in self.core.readable(several(prompts), batch_size, generator.read):
            for place, piece in generator.pieces(rows, self._clear(rows, choice)[0]):
                yield at + place, piece
            at += len(rows)

    def generate_stream(
        self,
        prompt: Any = None,
        *,
        messages: Sequence[Any] | None = None,
        task: str | Sequence[str] | None = None,
        **options: Any,
    ) -> TextStream:
        """The answer to one prompt while it is written: iterate over the result; `task` and `routing` are known at once."""
        choice = self.stages.choice(self.core.positions(task))
        generator = self._generator(choice, options)
        row = generator.read(prompts_of(prompt, messages))
        return generator.stream(row, self._clear([row], choice)[0][0])

    def decoder(self) -> StepDecoder:
        """What writes for prompts that come and go, one token of each at a time: for servers.

        Raises:
            InputError: the base is no decoder, or has a part that cannot be divided by prompts.
        """
        return StepDecoder(self.core, self.sets)

    # Steps

    def _with_routings(
        self, inputs: Any, routings: Sequence[Routing], size: int, read: Callable[[Any], Row] | None = None
    ) -> Iterator[tuple[list[Row], list[Routing]]]:
        """Rows of tensors, in batches, each with the routings that were made for them."""
        at = 0
        for rows in self.core.readable(several(inputs), size, read):
            own = list(routings[at : at + len(rows)])
            if len(own) < len(rows):
                raise InputError(f"more inputs than routings ({len(routings)}): each input needs its own.")
            yield rows, own
            at += len(rows)

    def _generator(self, choice: Choice, options: dict[str, Any]) -> Generator:
        return Generator(self.core, self.sets, [self.tasks[t] for t in choice.allowed], options)

    def _generations(
        self, generator: Generator, rows: list[Row], choice: Choice, session: SessionKeys | None = None
    ) -> list[Generation]:
        """Texts for a batch of prompts."""
        routings, timings = self._clear(rows, choice, session)
        began = time.perf_counter()
        found = generator(rows, routings)
        timings |= {"generation": milliseconds(began), "inputs": len(rows)}
        return [replace(generation, timings=timings) for generation in found]

    def _clear(
        self, rows: list[Row], choice: Choice, session: SessionKeys | None = None
    ) -> tuple[list[Routing], dict[str, float]]:
        """The routings of prompts, of which an unclear one selects nothing; and what it took."""
        routings, timings = self.stages.route(self.core.batch(rows), choice, session=session)
        return [clear(routing, choice.unknown.confidence) for routing in routings], timings
