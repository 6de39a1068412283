"""SHA-256 of many large files, by whatever engine there is: 140 GB take one core five minutes or more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from massmerge.engines.job import Engine, EngineJob
from massmerge.engines.unit import Unit
from massmerge.io.checksums import file_sha256

_SPEED = 400e6  # bytes per second and core


class Checksums(EngineJob):
    """A unit is a file; its result is the checksum. It is its own worker: there is nothing to open."""

    @property
    def name(self) -> str:
        """What it is."""
        return "checksums"

    @property
    def store(self) -> Path | None:
        """Nothing is written."""
        return None

    @property
    def computes(self) -> bool:
        """No tensor is touched."""
        return False

    def open(self) -> Checksums:
        """Nothing to open."""
        return self

    def carry_out(self, unit: Unit, before: Mapping[str, Any]) -> str:
        """The checksum of one file."""
        return file_sha256(unit.data)


def checksums(paths: Sequence[Path], engine: Engine) -> list[str]:
    """The checksums of files, in their order."""
    found: dict[str, str] = {}
    units = [Unit(str(p), 1 << 24, p.stat().st_size / _SPEED, data=p) for p in dict.fromkeys(paths)]
    engine.run(Checksums(), units, lambda unit, result: found.__setitem__(unit.key, result))
    return [found[str(path)] for path in paths]
