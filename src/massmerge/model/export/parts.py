"""What was exported, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Part:
    """One thing that was written: a task's adapter, or the model of a set."""

    name: str
    """The task, or the tasks of the set."""
    path: str
    """Relative to the target."""
    difference: float
    """Of its outputs to the bundle's, as a share of the largest."""
    rank: int | None = None
    left_out: dict[str, float] = field(default_factory=dict)
    """Tensors that it does not hold, with the share of the square of all changes that theirs are."""
    head: str = "none"
    """Where the head is: `inside`, `beside` (a file of its own) or `none`."""
    nbytes: int = 0


@dataclass(frozen=True)
class Exported:
    """Everything that an export wrote."""

    path: str
    form: str
    parts: tuple[Part, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON is written."""
        return asdict(self)
