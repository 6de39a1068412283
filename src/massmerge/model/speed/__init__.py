"""What makes answers faster and changes nothing else; `MASS_PLAIN=1` in the environment leaves all of it out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_at_once: ContextVar[bool] = ContextVar("at_once", default=False)


def plain() -> bool:
    """Whether everything is to run the plain way: one thread's order, no packed, cut or cached weights."""
    return os.environ.get("MASS_PLAIN", "0") not in ("", "0")


@contextmanager
def fast_at_once() -> Iterator[None]:
    """Models that are loaded here are made fast at their first batch; others after a few, which one input need not pay for.

    The fast way adds up in another order. So what a model answers does not depend, in the last digit, on what it was asked
    before, and several workers that share rows answer as one does.
    """
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


def at_once() -> bool:
    """Whether a model that is loaded now is made fast at its first batch."""
    return _at_once.get()
