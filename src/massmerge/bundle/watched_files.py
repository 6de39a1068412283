"""The files that a command reads, and whether they still are what they were when it opened them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TypeVar

from massmerge.bundle.checksum_job import checksums
from massmerge.bundle.layout import MANIFEST
from massmerge.bundle.manifest import read_manifest
from massmerge.checkpoints import Source
from massmerge.engines.job import Engine
from massmerge.engines.local import LocalEngine
from massmerge.errors import InputError, MassError
from massmerge.io.checksums import file_sha256
from massmerge.io.remote import RemoteFile
from massmerge.io.stamps import Stamp, file_stamp, is_recent
from massmerge.io.sums_ahead import sum_ahead

_T = TypeVar("_T")


@dataclass
class _Watched:
    who: str
    stamp: Stamp
    sha256: str | None
    revision: str | None = None


@dataclass(frozen=True)
class SeenFile:
    """A file as one process has seen it."""

    path: Path
    size: int
    written: int
    """Time of the last write, in nanoseconds."""
    sha256: str | None
    revision: str | None = None
    """The hub's commit that it is of, which stands for its bytes: each machine has its own download of it."""


class SourceFiles:
    """Watches files from before the first of their bytes is read.

    A file's size and times are compared whenever something was made of it, which costs nearly nothing: no program can set
    the time of the last change of a file, though it can set that of the last write. Only a file whose times have changed, or
    are so new that another write could have the same, is read again to compare its checksum.
    """

    def __init__(self) -> None:
        self._files: dict[Path, _Watched] = {}
        self._remote: dict[RemoteFile, str] = {}
        self._lock, self._rewritten = Lock(), 0

    @classmethod
    def of_bundle(cls, folder: Path) -> SourceFiles:
        """Those of a bundle, with the checksums of its manifest."""
        files, manifest = cls(), read_manifest(folder)
        files.add("the bundle", folder / MANIFEST)
        files.sums([folder / MANIFEST], LocalEngine(1))
        for name, entry in manifest["files"].items():
            files.add("the bundle", folder / name, entry["sha256"])
        return files

    def watch(self, who: str, source: Source) -> Source:
        """Watch the files of a base, expert or processor, which is given back."""
        for path in source.files():
            self.add(who, path, revision=source.revision)
        self._remote |= dict.fromkeys(source.weights.values(), who)
        return source

    def refuse_changed_remote(self) -> None:
        """Refuse files of stores that are not those that were looked up: nothing tells when each of their ranges was read.

        Raises:
            MassError: one has changed.
        """
        for file, who in self._remote.items():
            if file.changed():
                raise MassError(f"{who}: {file} changed while it was being read. Nothing was written. Run again.")

    def add(self, who: str, path: Path, sha256: str | None = None, *, revision: str | None = None) -> None:
        """Watch one file; its checksum is worked out when it is needed, unless it is known."""
        if path.is_file():  # else somebody else says that it is missing
            self._files.setdefault(path, _Watched(who, file_stamp(path), sha256, revision))

    def sums(self, paths: Iterable[Path], engine: Engine) -> list[str]:
        """The checksums of files, which must be the same from now on.

        Raises:
            MassError: one has changed since it was opened.
        """
        paths = list(paths)
        for path in paths:
            self.add("the recipe", path)
        known = {path: sum_ahead(path, self._files[path].stamp) for path in paths}
        rest = [path for path, sha256 in known.items() if sha256 is None]
        found = {path: sha256 for path, sha256 in known.items() if sha256 is not None}
        found |= zip(rest, checksums(rest, engine), strict=True)
        for path, sha256 in found.items():
            if file_stamp(path) != self._files[path].stamp:
                raise MassError(f"{path}: changed while it was being opened. Run the same command again.")
            self._files[path].sha256 = sha256
        return [found[path] for path in paths]

    def seen(self) -> tuple[SeenFile, ...]:
        """What another machine must see too."""
        return tuple(
            SeenFile(path, file.stamp[0], file.stamp[1], file.sha256, file.revision)
            for path, file in self._files.items()
        )

    def refuse_others(self, seen: Iterable[SeenFile]) -> None:
        """Refuse files that are not those that another process has seen, and take over what it knows of them.

        Size and time of the last write tell, or size and the hub's commit; another file that was copied at another time is
        read, if there is a checksum to compare.

        Raises:
            InputError: a file is missing, or is another one.
        """
        for file in seen:
            own = self._files.get(file.path)
            if own is None or not file.path.is_file():
                if not file.path.is_file():
                    raise InputError(f"{file.path}: not there on {platform.node()}. Workers need the same paths.")
                continue
            if not _same(own, file):
                raise InputError(
                    f"{file.path}: on {platform.node()} is not the file that the merge was planned with. Give every "
                    "worker the same files."
                )
            own.sha256 = file.sha256

    def settled(self, action: Callable[[], _T]) -> _T:
        """Do something that reads the files; again if one was rewritten during that, even with the same bytes.

        Raises:
            MassError: the content of a file has changed.
        """
        while True:
            before = self._rewritten
            try:
                done = action()
            except InputError:
                self._look()  # a file that is being replaced explains the fault better
                raise
            self._look()
            if self._rewritten == before:
                return done

    def _look(self) -> None:
        with self._lock:
            for path, file in self._files.items():
                stamp = file_stamp(path)
                if stamp == file.stamp and not (file.sha256 and is_recent(stamp)):
                    continue
                if file.sha256 is None or file_sha256(path) != file.sha256:
                    raise MassError(
                        f"{file.who}: {path} changed while it was being read. Nothing was written. Run the same command "
                        "again; a merge resumes where it stopped if the old file is restored."
                    )
                self._rewritten += stamp != file.stamp
                file.stamp = stamp


def _same(own: _Watched, other: SeenFile) -> bool:
    """Whether a file is the one that another process has seen."""
    if own.stamp[0] != other.size:
        return False
    if own.stamp[1] == other.written or (own.revision is not None and own.revision == other.revision):
        return True
    return other.sha256 is not None and file_sha256(other.path) == other.sha256
