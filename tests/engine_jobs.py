"""Jobs for tests of engines; workers of a cluster import this module too."""

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

from massmerge.engines.job import EngineJob
from massmerge.engines.unit import Unit
from massmerge.errors import InputError, MassError
from massmerge.merging.job import MergeJob
from massmerge.merging.worker import MergeWorker


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


@dataclass(frozen=True)
class KillingMerge(MergeJob):
    """A merge whose first unit on a certain machine takes the machine down in the middle of a write."""

    doomed: str = field(default="")

    def open(self):
        worker = super().open()
        return Killing(worker, self) if self.prepared is None else worker

    def __reduce__(self):
        return _killing, ({**self.__dict__, "prepared": None, "doomed": os.environ.get("DOOMED_NODE", "")},)


def _killing(state):
    return KillingMerge(**state)


class Killing:
    def __init__(self, worker: MergeWorker, job: KillingMerge) -> None:
        self.worker, self.job = worker, job

    def carry_out(self, unit: Unit, before):
        import ray

        if ray.get_runtime_context().get_node_id() == self.job.doomed:
            (self.job.parts / "half.draft").write_bytes(b"half of a part")
            (self.job.parts.parent / "killed").touch()
            os.kill(os.getppid(), signal.SIGKILL)  # the machine's raylet
            os.kill(os.getpid(), signal.SIGKILL)
        return self.worker.carry_out(unit, before)
