"""Texts of many requests are written together: a bounded queue, and one thread that takes a step for all of them at a time.

A prompt joins at the next step, whatever the others are at; one whose client has left is taken out at the next step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from massmerge.errors import DamageError
from massmerge.model.generative import Generative
from massmerge.routing.sessions import Sessions
from massmerge.serve.errors import ServiceError
from massmerge.serve.logs import without_values
from massmerge.serve.queue_thread import QueueThread
from massmerge.serve.texts import Ask, Begun, Texts, Written

log = logging.getLogger("massmerge.serve")
_INTERNAL = ServiceError(500, "internal", "The text could not be written because of an internal error.")
Heard = Begun | Written | ServiceError


@dataclass(eq=False)
class TextJob:
    """One text that is to be written."""

    ask: Ask
    heard: asyncio.Queue[Heard] = field(default_factory=asyncio.Queue)
    """How it was routed, then its pieces; or what went wrong."""
    began: float = 0.0
    gone: bool = False
    """Whether nobody reads it any more."""

    async def next(self) -> Begun | Written:
        """What comes next.

        Raises:
            ServiceError: the text cannot be written, or not to its end.
        """
        found = await self.heard.get()
        if isinstance(found, ServiceError):
            raise found
        return found


class TextWriter(QueueThread[TextJob]):
    """A queue of prompts and the thread that writes for them.

    Args:
        model: gives the model; a reload changes what it gives, and texts that have begun are finished by the old one.
        size: prompts that are written for at once.
        limit: prompts that may wait.
        sessions: where the sessions of prompts are remembered.
        options: those of `QueueThread`.
    """

    def __init__(
        self, model: Callable[[], Generative], *, size: int, limit: int, sessions: Sessions, **options: Any
    ) -> None:
        super().__init__(limit, "prompts", **options)
        self._model, self._size, self._sessions = model, size, sessions
        self._texts: dict[int, Texts[TextJob]] = {}  # by the model that writes them
        self._thread.start()

    def submit(self, ask: Ask, within: float = math.inf) -> TextJob:
        """Put a prompt into the queue.

        Args:
            ask: the prompt, and how to write.
            within: seconds after which a first token is of no use.

        Raises:
            ServiceError: there is no room, what waits already would take too long, or the thread ends.
        """
        job = TextJob(ask)
        self._put([job], within)
        return job

    def cancel(self, job: TextJob) -> None:
        """Write no further for a request that nobody waits for."""
        with self._changed:
            job.gone = True
            with suppress(ValueError):  # it is being written already
                self._queue.remove(job)

    def _drop(self) -> None:
        for texts in list(self._texts.values()):
            for job in list(texts.running):
                job.gone = True
        super()._drop()

    # In the thread

    def _do_next(self) -> bool:
        jobs = self._take()
        if jobs is not None:
            self._turn(jobs)
        return jobs is not None

    @property
    def _running(self) -> int:
        return sum(len(texts.running) for texts in self._texts.values())

    def _take(self) -> list[TextJob] | None:
        """Prompts that join now, waited for only where nothing is being written; none once all is done and closed."""
        with self._changed:
            while not (self._queue or self._running or self._closed):
                self._changed.wait()
            if not (self._queue or self._running):
                return None
            count = min(len(self._queue), self._size - self._running)
            return [self._queue.popleft() for _ in range(count)]

    def _turn(self, jobs: list[TextJob]) -> None:
        """One step of all texts; new ones begin, and those that nobody reads end."""
        for texts in self._texts.values():
            for job in [job for job in texts.running if job.gone]:
                texts.leave(job)
        if jobs:
            self._join(jobs)
        for texts in list(self._texts.values()):
            self._step(texts)
        current = id(self._model()) if self._texts else None
        self._texts = {key: texts for key, texts in self._texts.items() if texts.running or key == current}

    def _join(self, jobs: list[TextJob]) -> None:
        model = self._model()
        texts = self._texts.setdefault(id(model), Texts(model, self._sessions))
        now = time.monotonic()
        for job in jobs:
            job.began = now
        self._tell(list(texts.join([(job, job.ask) for job in jobs])))

    def _step(self, texts: Texts[TextJob]) -> None:
        if not texts.running:
            return
        began, jobs = time.monotonic(), list(texts.running)
        try:
            found: list[tuple[TextJob, Heard]] = list(texts.step())
        except DamageError:
            raise
        except Exception as error:  # the rows of a batch cannot be told apart any more
            log.error("a step failed; its texts end", extra={"fault": without_values(error)})
            self._texts = {key: one for key, one in self._texts.items() if one is not texts}
            found = [(job, _INTERNAL) for job in jobs]
        now = time.monotonic()
        self._hear(len(jobs), now - began)
        for job in [job for job, said in found if isinstance(said, Written) and said.end]:
            self._seconds_each += 0.2 * ((now - job.began) / len(jobs) - self._seconds_each)
        self._tell(found)

    def _tell(self, found: list[tuple[TextJob, Heard]]) -> None:
        def tell() -> None:
            """Hand each text what was said of it."""
            for job, said in found:
                job.heard.put_nowait(said)

        self._in_loop(tell)
