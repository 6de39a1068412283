"""A unit of work, and in which order units may run."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unit:
    """A piece of a job that one worker does in one go."""

    key: str
    """Its name within the job; messages use it."""
    memory: int = 0
    """Bytes that it holds at most."""
    seconds: float = 0.0
    """What one core takes for it, roughly."""
    after: tuple[str, ...] = ()
    """Keys of the units that come first; it is given their results."""
    data: Any = None
    """What the job must know to do it: small, picklable, no tensors of weights."""


class Schedule:
    """Hands out units whose predecessors are done, the longest first so that no worker is left with one at the end."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = {unit.key: unit for unit in units}
        self._results: dict[str, Any] = {}
        self._missing = {key: {a for a in unit.after if a in self._units} for key, unit in self._units.items()}
        self._waiting: dict[str, list[str]] = {}
        for key, missing in self._missing.items():
            for before in missing:
                self._waiting.setdefault(before, []).append(key)
        self._heap: list[tuple[float, int, str]] = []
        self._place = {key: place for place, key in enumerate(self._units)}
        for key in [key for key, missing in self._missing.items() if not missing]:
            self.put_back(self._units[key])

    def put_back(self, unit: Unit) -> None:
        """Hand a unit out again."""
        heapq.heappush(self._heap, (-unit.seconds, self._place[unit.key], unit.key))

    def next(self) -> Unit | None:
        """A unit that may run now; none while all others wait for some that run."""
        return self._units[heapq.heappop(self._heap)[2]] if self._heap else None

    def before(self, unit: Unit) -> Mapping[str, Any]:
        """The results that a unit is given."""
        return {key: self._results[key] for key in unit.after if key in self._results}

    def finish(self, unit: Unit, result: Any) -> None:
        """A unit is done; others may have waited for it."""
        self._results[unit.key] = result
        for key in self._waiting.pop(unit.key, ()):
            self._missing[key].remove(unit.key)
            if not self._missing[key]:
                self.put_back(self._units[key])

    @property
    def complete(self) -> bool:
        """Whether every unit is done."""
        return len(self._results) == len(self._units)
