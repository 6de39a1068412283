"""Texts of many requests are written together: a bounded queue, and one thread that takes a step for all of them at a time.

A prompt joins at the next step, whatever the others are at; one whose client has left is taken out at the next step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from massmerge.errors import DamageError
from massmerge.model.generative import Generative
from massmerge.routing.sessions import Sessions
from massmerge.serve.batching import ANSWERS
from massmerge.serve.errors import ServiceError
from massmerge.serve.logs import without_values
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


class TextWriter:
    """A queue of prompts and the thread that writes for them.

    Args:
        model: gives the model; a reload changes what it gives, and texts that have begun are finished by the old one.
        size: prompts that are written for at once.
        limit: prompts that may wait.
        sessions: where the sessions of prompts are remembered.
        begin: runs first in the thread.
        hear: called with the number of prompts of each step and the seconds that it took.
        died: called in the event loop with what ended the thread, if it was not `close`. Nothing is written after that.
    """

    def __init__(
        self, model: Callable[[], Generative], *, size: int, limit: int, sessions: Sessions,
        begin: Callable[[], None] = lambda: None,
        hear: Callable[[int, float], None] = lambda size, seconds: None,
        died: Callable[[BaseException], None] = lambda error: None,
    ) -> None:  # fmt: skip
        self._model, self._size, self._limit, self._sessions = model, size, limit, sessions
        self._begin, self._hear, self._died = begin, hear, died
        self._waiting: deque[TextJob] = deque()
        self._texts: dict[int, Texts[TextJob]] = {}  # by the model that writes them
        self._changed = threading.Condition()
        self._closed = False
        self._seconds_each = 0.0  # from one end of a text to the next, a moving mean
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name=ANSWERS, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Prompts in the queue."""
        return len(self._waiting)

    def submit(self, ask: Ask, within: float = math.inf) -> TextJob:
        """Put a prompt into the queue.

        Args:
            ask: the prompt, and how to write.
            within: seconds after which a first token is of no use.

        Raises:
            ServiceError: there is no room, what waits already would take too long, or the thread ends.
        """
        job = TextJob(ask)
        with self._changed:
            if self._closed:
                raise ServiceError(503, "stopping", "The service is stopping.", 5)
            if len(self._waiting) >= self._limit:
                message = f"{len(self._waiting)} prompts are waiting; the limit is {self._limit}."
                raise ServiceError(503, "full", message, self.retry_after())
            if self._expected() > within:  # better refused now than given up later
                message = f"The queue already takes about {self._expected():.0f} s."
                raise ServiceError(503, "full", message, self.retry_after())
            self._waiting.append(job)
            self._changed.notify()
        return job

    def retry_after(self) -> int:
        """Seconds after which what waits now has begun."""
        return max(1, math.ceil(self._expected()))

    def _expected(self) -> float:
        return len(self._waiting) * self._seconds_each

    def cancel(self, job: TextJob) -> None:
        """Write no further for a request that nobody waits for."""
        with self._changed:
            job.gone = True
            with suppress(ValueError):  # it is being written already
                self._waiting.remove(job)

    def close(self, within: float | None = None) -> None:
        """Write what has been asked for, then end the thread; wait at most this many seconds for that."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(within)

    # In the thread

    def _work(self) -> None:
        try:
            self._begin()
            while (jobs := self._take()) is not None:
                self._turn(jobs)
        except BaseException as error:  # a thread that ended unnoticed would leave a service that never answers
            self._closed = True
            self._in_loop(partial(self._died, error))

    @property
    def _running(self) -> int:
        return sum(len(texts.running) for texts in self._texts.values())

    def _take(self) -> list[TextJob] | None:
        """Prompts that join now, waited for only where nothing is being written; none once all is done and closed."""
        with self._changed:
            while not (self._waiting or self._running or self._closed):
                self._changed.wait()
            if not (self._waiting or self._running):
                return None
            count = min(len(self._waiting), self._size - self._running)
            return [self._waiting.popleft() for _ in range(count)]

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
            for job, said in found:
                job.heard.put_nowait(said)

        self._in_loop(tell)

    def _in_loop(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            self._loop.call_soon_threadsafe(function)
