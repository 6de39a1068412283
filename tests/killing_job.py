"""A merge that takes a machine of its cluster down; workers of the cluster import this module too."""

import os
import signal
from dataclasses import dataclass, field

from massmerge.engines.unit import Unit
from massmerge.merging.job import MergeJob
from massmerge.merging.worker import MergeWorker


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
