"""Requests that arrive together run together: a bounded queue, and one thread that empties it a batch at a time.

The thread takes its batches by itself. If the event loop handed them out, the model would stand still while the loop writes
the answers of the batch before.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from massmerge.errors import DamageError
from massmerge.model.answers import Prediction
from massmerge.serve.queue_thread import QueueThread


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


class Batcher(QueueThread[_Entry]):
    """A queue of inputs and the thread that answers them.

    Args:
        run: answers the items of a batch; what it raises becomes the fault of each of them.
        size: inputs that run at once.
        wait: seconds that the first input of a batch waits for others.
        limit: inputs that may wait.
        options: those of `QueueThread`.
    """

    def __init__(self, run: Run, *, size: int, wait: float, limit: int, **options: Any) -> None:
        super().__init__(limit, "inputs", **options)
        self._run, self._size, self._wait = run, size, wait
        self._thread.start()

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
        self._put([_Entry(job, index, item) for index, item in enumerate(items)], within)
        return job

    def cancel(self, job: Job) -> None:
        """Take the inputs of a request that nobody waits for out of the queue."""
        job.done.cancel()
        with self._changed:
            kept = [entry for entry in self._queue if entry.job is not job]
            if len(kept) < len(self._queue):
                self._queue = deque(kept)

    # In the thread

    def _do_next(self) -> bool:
        batch = self._take()
        if batch:
            self._run_batch(batch)
        return bool(batch)

    def _run_batch(self, batch: list[_Entry]) -> None:
        began = time.monotonic()
        results = self._answers(batch)
        took = time.monotonic() - began
        self._seconds_each += 0.2 * (took / len(batch) - self._seconds_each)
        self._hear(len(batch), took)

        def settle() -> None:
            """Give each waiting request its answer."""
            for entry, result in zip(batch, results, strict=True):
                entry.job.settle(entry.index, Outcome(result, 1000 * (began - entry.arrived)))

        self._in_loop(settle)

    def _take(self) -> list[_Entry]:
        """The next batch: the oldest input and those that can run with it; nothing once the queue is closed and empty."""
        with self._changed:
            while (left := self._patience()) is None or left > 0:
                self._changed.wait(left)
            if not self._queue:
                return []
            choice = self._queue[0].job.choice
            taken: list[_Entry] = []
            kept: deque[_Entry] = deque()
            for entry in self._queue:
                (taken if len(taken) < self._size and entry.job.choice == choice else kept).append(entry)
            self._queue = kept
            return taken

    def _patience(self) -> float | None:
        """Seconds to wait for more inputs; None while there is nothing to run, 0 when a batch should run or all is done."""
        if self._closed or len(self._queue) >= self._size:
            return 0.0
        return self._queue[0].arrived + self._wait - time.monotonic() if self._queue else None

    def _answers(self, batch: list[_Entry]) -> Sequence[Prediction | Fault]:
        try:
            top = max(entry.job.top for entry in batch)
            return self._run([entry.item for entry in batch], batch[0].job.choice, top)
        except DamageError:  # every other answer would come from the same files
            raise
        except Exception:
            fault = Fault("internal", "The input could not be answered because of an internal error.")
            return [fault] * len(batch)
