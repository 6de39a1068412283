"""Requests that arrive together run together: a bounded queue, and one thread that empties it a batch at a time.

The thread takes its batches by itself. If the event loop handed them out, the model would stand still while the loop writes
the answers of the batch before.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from massmerge.errors import DamageError
from massmerge.model.answers import Prediction
from massmerge.serve.errors import ServiceError

ANSWERS = "mass-batches"


@dataclass(frozen=True)
class BatchKey:
    """What inputs must agree on to run in one batch."""

    tasks: tuple[str, ...] | None = None
    route: Literal["input", "batch"] = "input"
    group: str | None = None
    """Set where one decision is made for a request: its inputs run with no others."""
    only_route: bool = False
    """Whether the task is all that is asked for."""


@dataclass(frozen=True)
class Fault:
    """An input that could not be answered; the others of its batch are."""

    code: str
    message: str


@dataclass(frozen=True)
class Outcome:
    """What became of one input."""

    result: Prediction | Fault
    waited: float = 0.0
    """Milliseconds in the queue."""


@dataclass(eq=False)
class Job:
    """The inputs of one request."""

    choice: BatchKey
    top: int
    outcomes: list[Outcome | None]
    done: asyncio.Future[list[Outcome]]
    left: int = 0

    def settle(self, index: int, outcome: Outcome) -> None:
        """Note what became of an input; with the last one the request is answered."""
        self.outcomes[index] = outcome
        self.left -= 1
        if self.left == 0 and not self.done.done():
            self.done.set_result([o for o in self.outcomes if o is not None])


@dataclass(eq=False)
class _Entry:
    job: Job
    index: int
    item: Any
    arrived: float = field(default_factory=time.monotonic)


Run = Callable[[Sequence[Any], BatchKey, int], Sequence[Prediction | Fault]]


class Batcher:
    """A queue of inputs and the thread that answers them.

    Args:
        run: answers the items of a batch; what it raises becomes the fault of each of them.
        size: inputs that run at once.
        wait: seconds that the first input of a batch waits for others.
        limit: inputs that may wait.
        begin: runs first in the thread.
        hear: called with the size of each batch and the seconds that it took.
        died: called in the event loop with what ended the thread, if it was not `close`. Nothing is answered after that.
    """

    def __init__(
        self, run: Run, *, size: int, wait: float, limit: int, begin: Callable[[], None] = lambda: None,
        hear: Callable[[int, float], None] = lambda size, seconds: None,
        died: Callable[[BaseException], None] = lambda error: None,
    ) -> None:  # fmt: skip
        self._run, self._size, self._wait, self._limit = run, size, wait, limit
        self._begin, self._hear, self._died = begin, hear, died
        self._entries: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._seconds_each = 0.0  # what an input takes, a moving mean
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name=ANSWERS, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Inputs in the queue."""
        return len(self._entries)

    def submit(self, items: Sequence[Any], choice: BatchKey, top: int, within: float = math.inf) -> Job:
        """Put the inputs of a request into the queue.

        Args:
            items: the inputs.
            choice: what they must share with others to run with them.
            top: how many labels to answer.
            within: seconds after which an answer is of no use.

        Raises:
            ServiceError: there is no room for all of them, what waits already would take too long, or the thread ends.
        """
        job = Job(choice, top, [None] * len(items), self._loop.create_future(), len(items))
        with self._changed:
            if self._closed:
                raise ServiceError(503, "stopping", "The service is stopping.", 5)
            if len(self._entries) + len(items) > self._limit:
                raise ServiceError(
                    503,
                    "full",
                    f"{len(self._entries)} inputs are waiting; the limit is {self._limit}.",
                    self.retry_after(),
                )
            if self._expected() > within:  # better refused now than given up later
                raise ServiceError(
                    503, "full", f"The queue already takes about {self._expected():.0f} s.", self.retry_after()
                )
            self._entries.extend(_Entry(job, index, item) for index, item in enumerate(items))
            self._changed.notify()
        return job

    def retry_after(self) -> int:
        """Seconds after which what waits now is answered."""
        return max(1, math.ceil(self._expected()))

    def _expected(self) -> float:
        """Seconds that the queue takes; none if it is empty, so that a slow batch in the past refuses nobody for long."""
        return len(self._entries) * self._seconds_each

    def cancel(self, job: Job) -> None:
        """Take the inputs of a request that nobody waits for out of the queue."""
        job.done.cancel()
        with self._changed:
            kept = [entry for entry in self._entries if entry.job is not job]
            if len(kept) < len(self._entries):
                self._entries = deque(kept)

    def close(self, within: float | None = None) -> None:
        """Answer what is in the queue, then end the thread; wait at most this many seconds for that."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(within)

    # In the thread

    def _work(self) -> None:
        try:
            self._begin()
            while batch := self._take():
                self._run_batch(batch)
        except BaseException as error:  # a thread that ended unnoticed would leave a service that never answers
            self._closed = True
            self._in_loop(partial(self._died, error))

    def _run_batch(self, batch: list[_Entry]) -> None:
        began = time.monotonic()
        results = self._answers(batch)
        took = time.monotonic() - began
        self._seconds_each += 0.2 * (took / len(batch) - self._seconds_each)
        self._hear(len(batch), took)

        def settle() -> None:
            for entry, result in zip(batch, results, strict=True):
                entry.job.settle(entry.index, Outcome(result, 1000 * (began - entry.arrived)))

        self._in_loop(settle)

    def _take(self) -> list[_Entry]:
        """The next batch: the oldest input and those that can run with it; nothing once the queue is closed and empty."""
        with self._changed:
            while (left := self._patience()) is None or left > 0:
                self._changed.wait(left)
            if not self._entries:
                return []
            choice = self._entries[0].job.choice
            taken: list[_Entry] = []
            kept: deque[_Entry] = deque()
            for entry in self._entries:
                (taken if len(taken) < self._size and entry.job.choice == choice else kept).append(entry)
            self._entries = kept
            return taken

    def _patience(self) -> float | None:
        """Seconds to wait for more inputs; None while there is nothing to run, 0 when a batch should run or all is done."""
        if self._closed or len(self._entries) >= self._size:
            return 0.0
        return self._entries[0].arrived + self._wait - time.monotonic() if self._entries else None

    def _answers(self, batch: list[_Entry]) -> Sequence[Prediction | Fault]:
        try:
            top = max(entry.job.top for entry in batch)
            return self._run([entry.item for entry in batch], batch[0].job.choice, top)
        except DamageError:  # every other answer would come from the same files
            raise
        except Exception:
            fault = Fault("internal", "The input could not be answered because of an internal error.")
            return [fault] * len(batch)

    def _in_loop(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            self._loop.call_soon_threadsafe(function)
