"""A job for tests of engines. Workers of a cluster import this module too, and it needs no torch: many of them die soon."""

import os
from dataclasses import dataclass
from pathlib import Path

from massmerge.engines.job import EngineJob
from massmerge.engines.unit import Unit
from massmerge.errors import InputError, MassError


@dataclass(frozen=True)
class Writing(EngineJob):
    """Units write their key to a file, or fail as their data says: each attempt leaves a mark."""

    folder: Path

    name = "writing"
    store = property(lambda self: self.folder)
    computes = False

    def open(self):
        return self

    def carry_out(self, unit: Unit, before):
        number = len(list(self.folder.glob(f"{unit.key}.attempt*")))
        (self.folder / f"{unit.key}.attempt{number}").touch()
        match unit.data:
            case "input":
                raise InputError("the recipe is wrong")
            case "work":
                raise MassError("cannot go on")
            case "disk":
                raise OSError(5, "Input/output error", "/data/x")
            case "memory":
                raise MemoryError
            case "bug":
                raise ZeroDivisionError("division")
            case "die":
                os._exit(1)
            case ("disk once", _) if number == 0:
                raise OSError(5, "Input/output error", "/data/x")
        (self.folder / unit.key).write_text(" ".join(before))
        return unit.key.upper()
