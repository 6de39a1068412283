"""What a process of another engine does with a unit: check that it fits, open the job once, tell who it is."""

from __future__ import annotations

import errno
import os
import pickle
import platform
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from massmerge.engines.job import EngineJob, UnitWorker, Versions
from massmerge.engines.unit import Unit
from massmerge.errors import InputError, MassError

Fault = Literal["input", "work", "passing", "version"]
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # another worker writes to the same disk


@dataclass(frozen=True)
class Parcel:
    """A job on its way to a worker; versions can be read before anything of the job is unpickled."""

    name: str
    versions: Versions
    store: Path | None
    packed: bytes
    digest: str

    @classmethod
    def of(cls, job: EngineJob) -> Parcel:
        """A job as it is sent."""
        packed = pickle.dumps(job)
        return cls(job.name, Versions.here(), job.store, packed, sha256(packed).hexdigest())


@dataclass(frozen=True)
class UnitOutcome:
    """What came of a unit: its result, or the kind of fault and what is to be said of it."""

    worker: str
    place: str = ""
    """The machine, as the engine calls it."""
    result: Any = None
    fault: Fault | None = None
    message: str = ""


_opened: dict[str, UnitWorker] = {}  # the job that this process has open, by its digest


def carry_out(parcel: Parcel, unit: Unit, before: Mapping[str, Any], claim: str, place: str) -> UnitOutcome:
    """Do a unit in this process. Faults come back as words: their classes may not be known where they are read."""
    worker = here(place)
    different = parcel.versions.differences(Versions.here())
    if different:
        return UnitOutcome(worker, place, fault="version", message=", ".join(different))
    note = None if parcel.store is None else parcel.store / claim
    try:
        if note is not None:
            note.write_text(worker, encoding="utf-8")
        return UnitOutcome(worker, place, _carry_out(parcel, unit, before))
    except InputError as error:
        return UnitOutcome(worker, place, fault="input", message=str(error))
    except MassError as error:
        return UnitOutcome(worker, place, fault="work", message=str(error))
    except (OSError, MemoryError) as error:
        lasting = isinstance(error, OSError) and error.errno in _LASTING
        return UnitOutcome(worker, place, fault="work" if lasting else "passing", message=_words(error))
    except Exception:
        return UnitOutcome(worker, place, fault="work", message=f"{unit.key}: {traceback.format_exc()}")
    finally:
        if note is not None:
            note.unlink(missing_ok=True)


def _carry_out(parcel: Parcel, unit: Unit, before: Mapping[str, Any]) -> Any:
    job: EngineJob = pickle.loads(parcel.packed)
    with job.around():
        if parcel.digest not in _opened:
            _opened.clear()  # a process has one job at a time, and a job may hold a model
            _opened[parcel.digest] = job.open()
        return _opened[parcel.digest].carry_out(unit, before)


def here(place: str = "") -> str:
    """This process, as messages name it."""
    return f"{platform.node()} ({place[:8] + ', ' if place else ''}process {os.getpid()})"


def _words(error: OSError | MemoryError) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return f"{where}{error.strerror or error}"
