"""What a method must know of all tensors together before it can merge the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from massmerge.merging.static.deltas import Deltas


@dataclass(frozen=True)
class Known:
    """What every tensor of a merge is merged with."""

    tasks: tuple[str, ...]
    """All tasks, in order."""
    entries: int
    """Entries of all tensors of the base that are merged, one task's."""
    options: dict[str, Any]
    """The method's options."""
    found: dict[str, Any] = field(default_factory=dict)
    """What earlier rounds concluded."""


@dataclass(frozen=True)
class Round:
    """One look at all tensors: figures of each, added up, and what follows from the sum."""

    look: Callable[[Deltas, Known], Tensor]
    conclude: Callable[[Tensor, Known], dict[str, Any]]
