"""The folder beside the target in which a merge keeps what is finished, so that a killed merge can go on.

.out.partial/
  fingerprint     what is being merged; a different merge starts anew
  lock            held while a merge runs
  parts/          one file a finished tensor, written under another name and renamed
  replaced/       the bundle that was at the target, until the result is there
  result/         what the parts are put together to, renamed to the target when complete
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from torch import Tensor

from massmerge.bundle import MANIFEST, MOVED, find_damage, read_manifest, work_folder
from massmerge.errors import InputError, MassError, listing
from massmerge.tensorfile import TensorInfo, read_header, write_tensors


class WorkFolder:
    """What is finished of one merge."""

    def __init__(self, target: Path, fingerprint: str) -> None:
        self.target = target
        self.path = work_folder(target)
        self.result = self.path / "result"
        self._parts = self.path / "parts"
        self._fingerprint = fingerprint
        self._made = [folder for folder in self.path.parents if not folder.exists()]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder for one merge; parts of a different merge are thrown away.

        Raises:
            MassError: another merge holds it, or it cannot be written.
        """
        with _in_words(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(self.path / "lock", timeout=0):
                    self._begin()
                    yield
            except Timeout:
                raise MassError(
                    f"{self.target}: another merge is writing it. Wait for it, or choose another target."
                ) from None

    def _begin(self) -> None:
        mark = self.path / "fingerprint"
        if not mark.is_file() or mark.read_text() != self._fingerprint:
            shutil.rmtree(self._parts, ignore_errors=True)
            mark.write_text(self._fingerprint)
        shutil.rmtree(self.result, ignore_errors=True)
        self._parts.mkdir(exist_ok=True)
        self.result.mkdir()

    def part(self, index: int) -> Path:
        """The file of one tensor."""
        return self._parts / f"{index:06d}.safetensors"

    def finished(self, index: int) -> bool:
        """Whether the tensor's part is there."""
        return self.part(index).is_file()

    def finish(self, index: int, tensors: dict[str, Tensor]) -> None:
        """Keep a tensor's part; it appears whole or not at all."""
        draft = self.part(index).with_suffix(".draft")
        write_tensors(draft, tensors)
        draft.replace(self.part(index))

    def header(self, index: int) -> dict[str, TensorInfo]:
        """What a part holds."""
        return read_header(self.part(index))

    def publish(self) -> None:
        """Make the complete result the target; an older one is moved aside first and then removed."""
        old = self.path / MOVED
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            self.target.rename(old)
        self.result.rename(self.target)
        _sync(self.target.parent)
        self.discard()

    def sweep(self) -> None:
        """Remove what is left of a merge that was killed when its result was in place already."""
        if self.path.is_dir():
            with self.opened():
                self.discard()

    def discard(self) -> None:
        """Remove the folder and everything in it, and the folders above it that were made for it and are empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()


def recover(target: Path) -> None:
    """Mend what a merge leaves that is killed while it replaces its target: a bundle moved aside, a folder beside it.

    While another merge holds that folder, nothing is done.
    """
    work = WorkFolder(target, "")
    if not work.path.is_dir():
        return
    with _in_words(work.path), suppress(Timeout), FileLock(work.path / "lock", timeout=0):
        moved, mark = work.path / MOVED, work.path / "fingerprint"
        if not target.exists() and moved.is_dir():
            moved.rename(target)
        # The mark is gone if it was killed while it tidied up.
        elif (target / MANIFEST).is_file() and (
            not mark.is_file() or read_manifest(target).get("fingerprint") == mark.read_text()
        ):
            work.discard()


def refuse_target(target: Path, fingerprint: str, *, overwrite: bool) -> bool:
    """Whether the target already is the result of this very merge.

    Raises:
        InputError: something else is there, which is not overwritten, or not without being told to.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    try:
        manifest = read_manifest(target)
    except InputError as error:
        raise InputError(
            f"{target}: exists and is no bundle that can be read; it is never overwritten. Choose another target, or "
            f"remove it yourself. ({str(error).partition('. ')[0]})"
        ) from None
    named = {target / MANIFEST, *(target / name for name in manifest["files"])}
    foreign = [p.relative_to(target).as_posix() for p in sorted(target.rglob("*")) if not p.is_dir() and p not in named]
    if overwrite and foreign:
        raise InputError(f"{target}: holds files that are not the bundle's; move them away:{listing(foreign)}")
    if overwrite:
        return False
    if manifest.get("fingerprint") != fingerprint:
        raise InputError(
            f"{target}: is a bundle of another recipe, or of sources that have changed since. `--overwrite` replaces it."
        )
    faults = find_damage(target, manifest)
    if faults:
        raise InputError(f"{target}: is this very bundle, but damaged:{listing(faults)}\n  `--overwrite` replaces it.")
    return True


@contextmanager
def _in_words(work: Path) -> Iterator[None]:
    """Errors of the disk in words."""
    try:
        yield
    except OSError as error:
        raise MassError(_words(error, work)) from error


def _words(error: OSError, work: Path) -> str:
    """What happened to the disk during a merge, and what to do."""
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes | os.PathLike) else work
    ours = path.is_relative_to(work) or work.is_relative_to(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{work}: the disk is full. Free some space and run the same command again; it goes on from there."
    if isinstance(error, FileNotFoundError):
        return f"{path}: vanished during the merge. Put it back and run the same command again; it goes on from there."
    if isinstance(error, FileExistsError | NotADirectoryError):
        file = next((p for p in (work, *work.parents) if p.exists() and not p.is_dir()), path)
        return f"{path}: cannot be made, because {file} is no folder. Choose another target."
    if ours:
        return f"{path}: cannot be written ({error.strerror}). Choose another target."
    return f"{path}: cannot be read ({error.strerror})."


def _sync(folder: Path) -> None:
    """Make a rename last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
