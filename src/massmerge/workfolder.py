"""The folder beside the target in which a merge keeps what is finished, so that a killed merge can go on.

.out.partial/
  fingerprint     what is being merged; a different merge starts anew
  lock            held while a merge runs
  parts/          one file a finished tensor, written under another name and renamed
  result/         what the parts are put together to, renamed to the target when complete
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from torch import Tensor

from massmerge.bundle import MANIFEST, read_manifest
from massmerge.errors import InputError, MassError
from massmerge.tensorfile import TensorInfo, read_header, write_tensors


class WorkFolder:
    """What is finished of one merge."""

    def __init__(self, target: Path, fingerprint: str) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.partial"
        self.result = self.path / "result"
        self._parts = self.path / "parts"
        self._fingerprint = fingerprint

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder for one merge; parts of a different merge are thrown away.

        Raises:
            MassError: another merge holds it, or it cannot be written.
        """
        with _writing(self.path):
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
        old = self.path / "replaced"
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            self.target.rename(old)
        self.result.rename(self.target)
        _sync(self.target.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the folder and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def refuse_target(target: Path, fingerprint: str, *, overwrite: bool) -> bool:
    """Whether the target already is the result of this very merge.

    Raises:
        InputError: something else is there, which is not overwritten, or not without being told to.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    if not (target / MANIFEST).is_file():
        raise InputError(
            f"{target}: exists and was not written by `mass merge`; it is never overwritten. Choose another."
        )
    if overwrite:
        return False
    try:
        same = read_manifest(target).get("fingerprint") == fingerprint
    except InputError:
        same = False
    if same:
        return True
    raise InputError(f"{target}: is another bundle already. `--overwrite` replaces it.")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Errors of the disk in words."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise MassError(
                f"{path}: the disk is full. Free some space and run the same command again; it goes on from there."
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise MassError(
                f"{error.filename or path}: cannot be written ({error.strerror}). Choose another target."
            ) from error
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise MassError(f"{path}: cannot be made, because {error.filename} is no folder.") from error
        if isinstance(error, FileNotFoundError):
            raise MassError(
                f"{error.filename}: vanished during the merge. Put it back and run the same command again."
            ) from error
        raise


def _sync(folder: Path) -> None:
    """Make a rename last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
