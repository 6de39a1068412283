"""Whether the files of a bundle are what its manifest says when it is loaded, and stay so while it answers.

Small files are read once, and compared with their SHA-256 before. To compare the large ones, whose tensors are mapped, takes
longer than to load the base: a thread does it in parallel, by XXH128 before the first answer and by SHA-256 after it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import BinaryIO

from massmerge.bundle.layout import holds_tensors
from massmerge.bundle.reader import Bundle
from massmerge.io.background import Background
from massmerge.io.checksums import sha256_of, xxh128_of

_HEAD_START = 1.0  # seconds that answers have the cores for themselves before SHA-256 begins
_REST = 4  # times as long as it works, so that it takes a fifth of a core


class _Ended(Exception):
    """The process ends; nobody asks any more."""


class DamageWatch:
    """Compares the files of a bundle that is about to be loaded, and notices when the mapped ones change later.

    Files are held open: to replace a bundle by renaming leaves the loaded one as it is.

    Args:
        bundle: the bundle.
        first: compare all checksums now; else those of large files while the bundle is loaded and answers.

    Raises:
        DamageError: a file is not what the manifest says.
    """

    def __init__(self, bundle: Bundle, *, first: bool) -> None:
        self._bundle = bundle
        paths = {name: bundle.path / name for name in filter(holds_tensors, bundle.manifest["files"])}
        self._files = {name: path.open("rb") for name, path in paths.items() if path.is_file()}
        weakref.finalize(self, _close, list(self._files.values()))
        self._stamps = {name: _stamp(file) for name, file in self._files.items()}
        bundle.refuse_damage(bundle.damage(sums=first or (lambda name: not holds_tensors(name))))
        self._faults: list[str] = []
        self._compared, self._hurry = threading.Event(), threading.Event()
        self._ended = False
        self._thread = Background(self._run, self._end)
        if first:
            self._compared.set()
        else:
            self._thread.start()

    def refuse_damage(self, *, wait: bool = False) -> None:
        """Raise an error if damage has been found, or a mapped file has changed since it was opened.

        Everything has been compared by a quick checksum when this returns; with `wait`, by SHA-256 too.
        """
        self._compared.wait()
        if wait and self._thread.ident is not None:
            self._hurry.set()
            self._thread.join()
        changed = [name for name, file in self._files.items() if _stamp(file) != self._stamps[name]]
        self._bundle.refuse_damage(self._faults + [f"{name}: changed while it was in use" for name in changed])

    def refuse_replaced(self) -> None:
        """Raise an error if a watched file has been replaced by another one."""
        pairs = [(name, os.fstat(file.fileno()), self._bundle.path / name) for name, file in self._files.items()]
        replaced = [name for name, seen, path in pairs if not (path.exists() and os.path.samestat(seen, path.stat()))]
        self._bundle.refuse_damage([f"{name}: replaced while the bundle was loaded" for name in replaced])

    def _end(self) -> None:
        self._ended = True
        self._hurry.set()

    def _run(self) -> None:
        try:
            said = self._bundle.manifest["files"]
            quick = [name for name in self._files if "xxh128" in said[name]]
            late = [
                name for name in self._files if name not in quick
            ]  # of bundles of before there was a quick checksum
            self._faults = self._differing(quick, "xxh128", xxh128_of) + self._differing(late, "sha256", sha256_of)
            self._compared.set()
            self._hurry.wait(_HEAD_START)
            self._faults = self._faults or self._differing(quick, "sha256", self._sha256_at_rest)
        except _Ended:
            pass
        except Exception as error:  # a disk that fails; what cannot be read cannot be trusted
            self._faults = [f"cannot be read ({error})"]
        finally:
            self._compared.set()

    def _sha256_at_rest(self, file: BinaryIO) -> str:
        """SHA-256, with a rest after each piece unless somebody waits.

        A thread of low priority would not do: on a busy machine it keeps the interpreter's lock while others run.
        """
        began = time.perf_counter()

        def rest() -> None:
            """Wait after each stretch of work, and stop where the search has ended."""
            nonlocal began
            self._hurry.wait(_REST * (time.perf_counter() - began))
            if self._ended:
                raise _Ended
            began = time.perf_counter()

        return sha256_of(file, between=rest)

    def _differing(self, names: list[str], kind: str, sum_of: Callable[[BinaryIO], str]) -> list[str]:
        """Faults of some large files by one kind of checksum."""
        said = self._bundle.manifest["files"]
        word = {"xxh128": "XXH128", "sha256": "SHA-256"}[kind]
        return [
            f"{name}: its bytes have changed ({word} differs)"
            for name in names
            if sum_of(self._files[name]) != said[name][kind]
        ]


def _stamp(file: BinaryIO) -> tuple[int, int]:
    """What changes with every write to a file; renaming or removing it changes neither."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def _close(files: list[BinaryIO]) -> None:
    for file in files:
        file.close()
