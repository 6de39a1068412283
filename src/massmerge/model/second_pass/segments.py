"""Which rows of the batch that is under way belong to which selected set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property

import torch

from massmerge.model.second_pass.grouped import Groups, make_groups
from massmerge.model.second_pass.updates import SetChanges


@dataclass(frozen=True)
class Segment:
    """Successive rows of a sorted batch that share a selected set."""

    changes: SetChanges
    start: int
    stop: int


@dataclass(frozen=True)
class Segments:
    """All segments of a batch.

    Attributes:
        parts: one after the other.
        batch: how many rows they have together.
        for_heads: whether only heads read what comes out, so that what they do not read need not be computed.
    """

    parts: tuple[Segment, ...]
    batch: int
    for_heads: bool = False

    @cached_property
    def _groups(self) -> dict[torch.device, Groups]:
        return {}

    def groups(self, device: torch.device) -> Groups:
        """The rows in groups of one size, for a device where a loop over the parts is slow; made once."""
        if device not in self._groups:
            self._groups[device] = make_groups([(part.start, part.stop) for part in self.parts], device)
        return self._groups[device]

    def within(self, rows: slice) -> Segments:
        """The segments of some successive rows, counted from the first of them."""
        if rows.stop - rows.start == self.batch:
            return self
        cut = [
            Segment(p.changes, max(p.start, rows.start) - rows.start, min(p.stop, rows.stop) - rows.start)
            for p in self.parts
            if p.start < rows.stop and p.stop > rows.start
        ]
        return Segments(tuple(cut), rows.stop - rows.start, self.for_heads)


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
