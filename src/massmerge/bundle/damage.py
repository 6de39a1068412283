"""Whether the files of a bundle are what its manifest says when it is loaded, and stay so while it answers.

Small files are read once, and compared with their SHA-256 before. To compare the large ones, whose tensors are mapped, takes
about as long as to load the base: a thread does it in parallel, by CRC-32 before the first answer and by SHA-256 after it.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from massmerge.bundle.layout import holds_tensors
from massmerge.bundle.reader import Bundle
from massmerge.io.checksums import crc32_of, sha256_of


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
        self._compared = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
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
            self._thread.join()
        changed = [name for name, file in self._files.items() if _stamp(file) != self._stamps[name]]
        self._bundle.refuse_damage(self._faults + [f"{name}: changed while it was in use" for name in changed])

    def refuse_replaced(self) -> None:
        """Raise an error if a watched file has been replaced by another one."""
        pairs = [(name, os.fstat(file.fileno()), self._bundle.path / name) for name, file in self._files.items()]
        replaced = [name for name, seen, path in pairs if not (path.exists() and os.path.samestat(seen, path.stat()))]
        self._bundle.refuse_damage([f"{name}: replaced while the bundle was loaded" for name in replaced])

    def _run(self) -> None:
        try:
            self._faults = self._differing("crc32", crc32_of) + self._differing("sha256", sha256_of, known="crc32")
            self._compared.set()
            if sys.platform == "linux":  # elsewhere the number of a thread could be that of another process
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            self._faults = self._faults or self._differing("sha256", sha256_of)
        except Exception as error:  # a disk that fails; what cannot be read cannot be trusted
            self._faults = [f"cannot be read ({error})"]
        finally:
            self._compared.set()

    def _differing(self, kind: str, sum_of: Callable[[BinaryIO], str], *, known: str | None = None) -> list[str]:
        """Faults of large files by one kind of checksum; of bundles without it, or without the one `known`, none."""
        said = self._bundle.manifest["files"]
        word = {"crc32": "CRC-32", "sha256": "SHA-256"}[kind]
        return [
            f"{name}: its bytes have changed ({word} differs)"
            for name, file in self._files.items()
            if kind in said[name] and known not in said[name] and sum_of(file) != said[name][kind]
        ]


def _stamp(file: BinaryIO) -> tuple[int, int]:
    """What changes with every write to a file; renaming or removing it changes neither."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def _close(files: list[BinaryIO]) -> None:
    for file in files:
        file.close()
