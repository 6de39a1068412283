"""Runs units in threads of this process: the default."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Lock, local
from typing import Any

import torch

from massmerge.engines.job import Done, EngineJob, UnitWorker
from massmerge.engines.unit import Schedule, Unit
from massmerge.errors import InputError

_opening = Lock()  # one at a time: transformers sets switches of the whole process while it builds a model


class LocalEngine:
    """Threads of this process, one core each.

    Args:
        workers: units that run at the same time; one per core by default.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise InputError(f"workers must be at least 1, not {workers}.")
        self.workers = workers or os.cpu_count() or 1

    @property
    def overhead(self) -> float:
        """None to speak of."""
        return 0.0

    def run(self, job: EngineJob, units: Sequence[Unit], done: Done) -> None:
        """Do all units; the first fault stops everything."""
        schedule, opened = Schedule(units), _Opened(job, done)
        running: dict[Future[Any], Unit] = {}
        begin = _one_thread if job.computes else None
        with job.around(), ThreadPoolExecutor(self.workers, initializer=begin) as pool:
            try:
                while not schedule.complete:
                    while (unit := schedule.next()) is not None:
                        running[pool.submit(opened.carry_out, unit, schedule.before(unit))] = unit
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        schedule.finish(running.pop(future), future.result())
            finally:
                for future in running:
                    future.cancel()

    def close(self) -> None:
        """Nothing is held."""


def _one_thread() -> None:
    """OpenMP counts the threads that each thread may start by itself."""
    torch.set_num_threads(1)


class _Opened:
    """A job that is opened once, or once per thread."""

    def __init__(self, job: EngineJob, done: Done) -> None:
        self._job, self._done, self._own, self._lock = job, done, local(), Lock()
        self._all: UnitWorker | None = job.open() if job.shared else None

    def carry_out(self, unit: Unit, before: Any) -> Any:
        """The result of a unit, by this thread's worker."""
        worker = self._all or getattr(self._own, "worker", None)
        if worker is None:
            with _opening:
                worker = self._own.worker = self._job.open()
        result = worker.carry_out(unit, before)
        with self._lock:  # before this worker goes on
            self._done(unit, result)
        return result
