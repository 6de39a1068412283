"""Threads in the background, which end before the process does.

Python ends a daemon thread wherever it is when the interpreter shuts down. One that is inside of torch then, or that holds
what torch keeps for each thread, ends the process with it: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable
from weakref import WeakSet

_PATIENCE = 5.0  # seconds that the process waits for all of them when it ends
_running: WeakSet[Background] = WeakSet()


class Background(threading.Thread):
    """A daemon thread that is told to end, and waited for, when the process ends.

    Args:
        work: what it does.
        quit: makes the work end soon; it is called in another thread, maybe after the work is done.
        name: name of the thread.
    """

    def __init__(self, work: Callable[[], object], quit: Callable[[], object], name: str | None = None) -> None:
        super().__init__(target=self._do, name=name, daemon=True)
        self._work, self._quit = work, quit
        _running.add(self)

    def quit(self) -> None:
        """Tell the work to end."""
        self._quit()

    def _do(self) -> None:
        """Do the work, then let go of what it and `quit` hold."""
        try:
            self._work()
        finally:
            self._work = self._quit = _nothing


def _nothing() -> None:
    pass


def end_background(threads: Iterable[Background] | None = None, within: float = _PATIENCE) -> None:
    """Tell threads to end, all that run by default, and wait for them for so many seconds."""
    alive = [thread for thread in (list(_running) if threads is None else threads) if thread.is_alive()]
    for thread in alive:
        thread.quit()
    until = time.monotonic() + within
    for thread in alive:
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(end_background)
