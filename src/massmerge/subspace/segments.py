"""Which rows of the batch that is under way belong to which selected set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from massmerge.subspace.updates import SetChanges


@dataclass(frozen=True)
class Segment:
    """Successive rows of a sorted batch that share a selected set."""

    changes: SetChanges
    start: int
    stop: int


@dataclass(frozen=True)
class Segments:
    """All segments of a batch."""

    parts: tuple[Segment, ...]
    batch: int


_ACTIVE: ContextVar[Segments] = ContextVar("active segments")


def active() -> Segments:
    """The segments of the pass that is under way in this thread."""
    return _ACTIVE.get()


@contextmanager
def running(segments: Segments) -> Iterator[None]:
    """Run a pass for these segments; other threads have their own."""
    token = _ACTIVE.set(segments)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
