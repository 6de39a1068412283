"""Runs units as tasks of a Ray cluster: any number of machines that see the same files."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from massmerge.engines.job import Done, EngineJob
from massmerge.engines.unit import Schedule, Unit
from massmerge.engines.worker import Parcel, UnitOutcome, carry_out
from massmerge.errors import InputError, MassError

RETRIES = 3
"""How often a unit is tried again after a worker died, ran out of memory, or could not read or write."""
OVERHEAD = 0.02
_LEAST_MEMORY = 1 << 26  # bytes
_AHEAD = 2  # units per core that are handed to Ray at a time, so that no core waits for the driver


@dataclass
class _Attempt:
    """A unit that Ray was given."""

    unit: Unit
    claim: str


@dataclass
class _Faults:
    """What went wrong so far."""

    count: Counter[str] = field(default_factory=Counter)
    places: dict[str, set[str]] = field(default_factory=dict)
    """Machines on which a unit failed."""
    refused: dict[str, str] = field(default_factory=dict)
    """Machines whose versions differ, with the differences."""


class RayEngine:
    """The machines of a Ray cluster.

    Args:
        address: `ray://host:port` of a cluster, or the `host:port` of one that this machine is a node of; by default the
            cluster that this process is connected to, or that `RAY_ADDRESS` or `ray start` on this machine names.
        workers: units that run at the same time, at most; as many as the cluster has cores by default.

    Sources and targets must have the same paths on every machine. Weights and rows go by these files; Ray carries
    descriptions, names and checksums.

    Raises:
        InputError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise InputError(f"workers must be at least 1, not {workers}.")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise InputError("the engine ray needs Ray: pip install 'massmerge[ray]'") from None
        self._ray: Any = ray
        self._workers, self._own = workers, not ray.is_initialized()
        if self._own:
            self._connect(address or "auto")
        self._task: Any = ray.remote(_task)  # once: each call would send the function to the cluster again

    @property
    def overhead(self) -> float:
        """What Ray takes to place a unit and to bring back its result."""
        return OVERHEAD

    def _connect(self, address: str) -> None:
        try:
            self._ray.init(address, log_to_driver=False, configure_logging=False)
        except Exception as error:  # of whatever transport Ray uses
            said = str(error).strip().partition("\n")[0].rstrip(".")
            named = "on this machine" if address == "auto" else f"at {address}"
            raise InputError(
                f"engine ray: no cluster {named} ({said}). Start one with `ray start --head`, or write ray://host:port."
            ) from None

    def close(self) -> None:
        """Leave the cluster, unless this process had joined it before."""
        if self._own:
            self._ray.shutdown()

    def run(self, job: EngineJob, units: Sequence[Unit], done: Done) -> None:
        """Do all units on the cluster; see `Engine.run`."""
        parcel = self._ray.put(Parcel.of(job))
        schedule, faults, store = Schedule(units), _Faults(), job.store
        running: dict[Any, _Attempt] = {}
        try:
            while not schedule.complete:
                self._hand_out(parcel, schedule, running, faults, claims=store is not None)
                ready, _ = self._ray.wait(list(running), num_returns=1, timeout=5.0)
                for reference in ready:
                    attempt = running.pop(reference)
                    outcome = self._outcome(reference, attempt, store)
                    if outcome.fault is None:
                        schedule.finish(attempt.unit, outcome.result)
                        done(attempt.unit, outcome.result)
                    else:
                        self._weigh(attempt.unit, outcome, faults)
                        schedule.put_back(attempt.unit)
        finally:
            for reference in running:
                self._ray.cancel(reference, force=True)

    def _hand_out(
        self, parcel: Any, schedule: Schedule, running: dict[Any, _Attempt], faults: _Faults, *, claims: bool
    ) -> None:
        cores = int(self._ray.cluster_resources().get("CPU", 1))
        most = self._workers or max(1, cores * _AHEAD)
        while len(running) < most and (unit := schedule.next()) is not None:
            claim = f"{uuid.uuid4().hex}.claim" if claims else ""
            options = {"num_cpus": 1, "memory": self._memory(unit), "max_retries": 0, "name": unit.key}
            task = self._task.options(**options, **self._placed(unit, faults))
            running[task.remote(parcel, unit, schedule.before(unit), claim)] = _Attempt(unit, claim)

    def _memory(self, unit: Unit) -> int:
        """What a unit asks for; no more than the largest machine has, for an estimate must not keep it waiting forever.

        Rounded up, for Ray keeps a queue for every amount that it is asked for.
        """
        largest = max((node["Resources"].get("memory", 0) for node in self._alive()), default=0)
        return int(min(1 << max(_LEAST_MEMORY, unit.memory).bit_length(), largest))

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]

    def _placed(self, unit: Unit, faults: _Faults) -> dict[str, Any]:
        """Where a unit goes: anywhere, or where neither its versions differ nor it has failed before."""
        avoided = faults.places.get(unit.key, set())
        if not avoided and not faults.refused:
            return {}
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node["NodeID"] for node in self._alive() if node["NodeID"] not in faults.refused]
        if not nodes:
            listed = "; ".join(f"{who}: {what}" for who, what in faults.refused.items())
            raise InputError(
                f"no worker has the versions of this process: {listed}. Install the same on every machine."
            )
        others = [node for node in nodes if node not in avoided] or nodes
        chosen = others[hash((unit.key, faults.count[unit.key])) % len(others)]
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(chosen, soft=not faults.refused)}

    def _outcome(self, reference: Any, attempt: _Attempt, store: Path | None) -> UnitOutcome:
        try:
            found: UnitOutcome = self._ray.get(reference)
            return found
        except self._ray.exceptions.RayError as error:  # the process or the machine is gone
            note = None if store is None else store / attempt.claim
            worker = note.read_text(encoding="utf-8") if note is not None and note.is_file() else "an unknown worker"
            said = str(error).strip().partition("\n")[0]
            return UnitOutcome(worker, fault="passing", message=f"the worker died ({type(error).__name__}: {said})")

    def _weigh(self, unit: Unit, outcome: UnitOutcome, faults: _Faults) -> None:
        """Raise what cannot be mended by trying again; note the rest."""
        if outcome.fault == "input":
            raise InputError(outcome.message)
        if outcome.fault == "work":
            raise MassError(f"{outcome.message} ({outcome.worker})")
        if outcome.fault == "version":
            faults.refused[outcome.place] = f"{outcome.worker} has {outcome.message}"
            return
        faults.count[unit.key] += 1
        faults.places.setdefault(unit.key, set()).add(outcome.place)
        if faults.count[unit.key] > RETRIES:
            raise MassError(
                f"{unit.key}: failed {RETRIES + 1} times, the last time on {outcome.worker}: {outcome.message}. What is "
                "finished is kept. Run the same command to resume."
            )


def _task(parcel: Parcel, unit: Unit, before: dict[str, Any], claim: str) -> UnitOutcome:
    """A unit in one of Ray's processes."""
    import ray

    return carry_out(parcel, unit, before, claim, ray.get_runtime_context().get_node_id())
