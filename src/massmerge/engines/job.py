"""What an engine runs: a description that any worker can be sent, and what a worker makes of it."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from massmerge.engines.unit import Unit

_LIBRARIES = ("torch", "numpy", "scipy", "transformers")  # whose rounding or names show in results


@dataclass(frozen=True)
class Versions:
    """What the bytes of a result depend on besides its inputs."""

    massmerge: str
    libraries: tuple[tuple[str, str], ...]
    instructions: str
    """The processor's instruction set as torch uses it: sums of another one round differently."""

    @classmethod
    def here(cls) -> Versions:
        """Those of this process."""
        import torch

        import massmerge

        found = tuple((name, version(name)) for name in _LIBRARIES)
        return cls(massmerge.__version__, found, f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}")

    def differences(self, other: Versions) -> list[str]:
        """What another process has that this one has not, in words."""
        pairs = [("massmerge", self.massmerge, other.massmerge), ("processor", self.instructions, other.instructions)]
        ours, theirs = dict(self.libraries), dict(other.libraries)
        pairs += [(name, ours.get(name, "none"), theirs.get(name, "none")) for name in {**ours, **theirs}]
        return [f"{name} {its} instead of {own}" for name, own, its in pairs if own != its]


class UnitWorker(Protocol):
    """A job as one process has opened it."""

    def carry_out(self, unit: Unit, before: Mapping[str, Any]) -> Any:
        """Do a unit.

        Whoever does it again, here or elsewhere, writes the same files under the same names. Files appear whole or not at
        all, under drafts of names that no other writer has.

        Args:
            unit: the unit.
            before: results of the units that it comes after.

        Returns:
            Something small: names, checksums, counts. Tensors and rows go to files.

        Raises:
            InputError: recipe, sources or rows are wrong. Everything stops.
            MassError: the work cannot go on. Everything stops.
            OSError: a disk or a network failed. Another worker may do better.
        """
        ...


class EngineJob(ABC):
    """What is to be done, as each worker is told it: picklable and small."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is, for messages."""

    @property
    @abstractmethod
    def store(self) -> Path | None:
        """The folder that workers write to, which all of them must see; none if units only return something."""

    @property
    def shared(self) -> bool:
        """Whether threads of one process may use one opened job; else each of them opens its own."""
        return True

    @abstractmethod
    def open(self) -> UnitWorker:
        """Open it in this process."""

    @property
    def computes(self) -> bool:
        """Whether units compute with tensors, so that libraries are held to one thread per worker."""
        return True

    def around(self) -> AbstractContextManager[None]:
        """What a process sets up for as long as it carries out units."""
        return one_thread_each() if self.computes else nullcontext()


Done = Callable[[Unit, Any], None]
"""Is told in the process that started the job which unit is done, and what it returned."""


class Engine(Protocol):
    """Runs the units of jobs."""

    @property
    def overhead(self) -> float:
        """Seconds that it spends on a unit besides the work; jobs make their units long enough that it does not show."""
        ...

    def run(self, job: EngineJob, units: Sequence[Unit], done: Done) -> None:
        """Do all units; return when all are done.

        Raises:
            MassError: a unit failed, and so did its repetitions. What is finished stays.
        """
        ...

    def close(self) -> None:
        """Let go of what the engine holds."""
        ...


@contextmanager
def one_thread_each() -> Iterator[None]:
    """One thread for every library below: sums then have one order, and bytes do not depend on the number of workers."""
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    try:
        with threadpool_limits(1):
            torch.set_num_threads(1)
            yield
    finally:
        torch.set_num_threads(before)
