"""A bounded queue, and the one thread that empties it."""

from __future__ import annotations

import asyncio
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from massmerge.io.background import Background
from massmerge.serve.errors import ServiceError

ANSWERS = "mass-batches"
_T = TypeVar("_T")


class QueueThread(ABC, Generic[_T]):
    """What waits, and the thread that works on it.

    Args:
        limit: how much may wait.
        what: what waits, for messages.
        begin: runs first in the thread.
        hear: called with the size of each piece of work and the seconds that it took.
        died: called in the event loop with what ended the thread, if it was not `close`. Nothing is done after that.
    """

    def __init__(
        self, limit: int, what: str, begin: Callable[[], None] = lambda: None,
        hear: Callable[[int, float], None] = lambda size, seconds: None,
        died: Callable[[BaseException], None] = lambda error: None,
    ) -> None:  # fmt: skip
        self._limit, self._what, self._begin, self._hear, self._died = limit, what, begin, hear, died
        self._queue: deque[_T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._seconds_each = 0.0  # how long one of the queue keeps the others waiting, a moving mean
        self._loop = asyncio.get_running_loop()
        self._thread = Background(self._work, self._drop, ANSWERS)

    @property
    def waiting(self) -> int:
        """How much waits in the queue."""
        return len(self._queue)

    def retry_after(self) -> int:
        """Seconds after which what waits now has had its turn."""
        return max(1, math.ceil(self._expected()))

    def close(self, within: float | None = None) -> None:
        """Finish what has been asked for, then end the thread; wait at most this many seconds for that."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(within)

    def _put(self, items: list[_T], within: float) -> None:
        """Put all of these into the queue.

        Raises:
            ServiceError: there is no room for them, what waits already would take longer than `within` seconds, or the
                thread ends.
        """
        with self._changed:
            if self._closed:
                raise ServiceError(503, "stopping", "The service is stopping.", 5)
            if len(self._queue) + len(items) > self._limit:
                message = f"{len(self._queue)} {self._what} are waiting; the limit is {self._limit}."
                raise ServiceError(503, "full", message, self.retry_after())
            if self._expected() > within:  # better refused now than given up later
                message = f"The queue already takes about {self._expected():.0f} s."
                raise ServiceError(503, "full", message, self.retry_after())
            self._queue.extend(items)
            self._changed.notify()

    def _expected(self) -> float:
        """Seconds that the queue takes; none if it is empty, so that slow work in the past refuses nobody for long."""
        return len(self._queue) * self._seconds_each

    # In the thread

    def _work(self) -> None:
        try:
            self._begin()
            while self._do_next():
                pass
        except BaseException as error:  # a thread that ended unnoticed would leave a service that never answers
            self._closed = True
            self._in_loop(partial(self._died, error))

    @abstractmethod
    def _do_next(self) -> bool:
        """Wait for something to do, and do it; False where all is done and the queue is closed."""

    def _drop(self) -> None:
        """Make the thread end without what waits: the process ends."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify()

    def _in_loop(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            self._loop.call_soon_threadsafe(function)
