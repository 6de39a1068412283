"""A bounded random sample of what voters see of a service's traffic, in a file that `mass adapt` reads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from massmerge.io.durable import drafted
from massmerge.io.tensor_file import write_tensors
from massmerge.model.route.stages import Stages
from massmerge.routing import Activation


class Reservoir:
    """Keeps the activations of so many inputs, every input with the same chance; nothing else of an input.

    Args:
        path: where they are written.
        size: how many inputs are kept.
        every: seconds between writes.
        clock: gives the time in seconds.
        seed: of the draw.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        *,
        every: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self._path, self._size, self._every, self._clock = path, size, every, clock
        self._draw, self._lock = random.Random(seed), threading.Lock()
        self._kept: dict[str, Tensor] = {}
        self._seen, self._changed, self._written = 0, False, clock()

    def __len__(self) -> int:
        """How many inputs are kept."""
        return min(self._seen, self._size)

    def __call__(self, stages: Stages, batch: dict[str, Tensor], activations: list[Activation]) -> None:
        """Keep some inputs of a batch, of which the voters of the first look see so much."""
        with self._lock:
            first = dict(zip((v.name for v in stages.voters), activations, strict=True))
            self._forget_others(stages)
            chosen = self._places(next(iter(batch.values())).shape[0])
            if chosen:
                rows = torch.tensor(list(chosen.values()))
                seen = {name: one.of(rows).pooled() for name, one in first.items()}
                if stages.second is not None:  # which has not looked at most of them
                    again = stages.second.first_pass({key: value[rows] for key, value in batch.items()})
                    seen |= {v.name: one.pooled() for v, one in zip(stages.second.voters, again, strict=True)}
                self._put(list(chosen), seen)
            due = self._changed and self._clock() - self._written >= self._every
        if due:
            self.write()

    def write(self) -> None:
        """Write what is kept, if there is anything new."""
        with self._lock:
            if not self._changed:
                return
            with drafted(self._path) as draft:
                write_tensors(draft, {name: kept[: len(self)].clone() for name, kept in self._kept.items()})
            self._changed, self._written = False, self._clock()

    def _places(self, count: int) -> dict[int, int]:
        """For each place that is filled anew the row of the batch that fills it (Vitter's algorithm R)."""
        found: dict[int, int] = {}
        for row in range(count):
            place = self._seen if self._seen < self._size else self._draw.randrange(self._seen + 1)
            self._seen += 1
            if place < self._size:
                found[place] = row
        return found

    def _put(self, places: list[int], seen: dict[str, Tensor]) -> None:
        for name, rows in seen.items():
            if name not in self._kept:
                self._kept[name] = torch.zeros(self._size, rows.shape[1], dtype=torch.float16)
            self._kept[name][places] = rows.half().cpu()
        self._changed = True

    def _forget_others(self, stages: Stages) -> None:
        """Begin anew where a reload has brought a bundle with other voters."""
        looks = [look for look in (stages.first, stages.second) if look is not None]
        widths = {voter.name: voter.site.width for look in looks for voter in look.voters}
        if self._kept and widths != {name: kept.shape[1] for name, kept in self._kept.items()}:
            self._kept, self._seen = {}, 0
