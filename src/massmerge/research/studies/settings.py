"""Options of a study, and one row of what it measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StudySettings:
    """Options of a study."""

    split: str | None = None
    limit: int | None = None
    seed: int = 0
    quick: bool = False
    """A small sample, and grids of a few points."""
    batch_size: int = 32
    device: str = "auto"
    dtype: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of single studies: `search` and `trials`, and `peers` with those of routed peers."""

    def peer(self, name: str) -> dict[str, Any]:
        """The options of a routed peer that differ from its defaults."""
        return dict(self.options.get("peers", {}).get(name, {}))


@dataclass(frozen=True)
class Sample:
    """One row of the suite."""

    task: str
    place: int
    """Among the rows of its task."""
    label: str
