"""The folder beside a target in which a command works under a lock, and whose result becomes the target when complete.

.out.partial/     of commands that write a bundle: merge, add, remove, calibrate; `.out.export` of an export
  lock            held while a command works
  result/         what will be the target, or what was there before; nobody misses it
  replaced/       what was at the target, for the moment between two renames; only where folders cannot trade places
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from massmerge.bundle.layout import MOVED, work_folder
from massmerge.errors import MassError
from massmerge.io.addresses import is_address
from massmerge.io.durable import exchange, sync_folder, sync_tree

_LOCK = "lock"


class Busy(MassError):
    """Another command is writing the same target."""


class WorkFolder:
    """A place to work in beside a target.

    Args:
        target: the folder that will be written.
        kind: the ending of the work folder's name. Commands that share it exclude each other.
    """

    def __init__(self, target: Path, kind: Literal["partial", "export"] = "partial") -> None:
        self.target = target.resolve()
        self.path = work_folder(self.target, kind)
        self.result = self.path / "result"
        self.moved = self.path / MOVED
        self._made = [folder for folder in self.path.parents if not folder.exists()]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for one command.

        Raises:
            Busy: another command holds it.
            MassError: it is a link, or holds one: its files would be written, and removed, elsewhere.
        """
        lock = FileLock(self.path / _LOCK, timeout=0)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._refuse_links()
            lock.acquire()
        except (Timeout, FileNotFoundError):  # not found: the other one has just removed the folder
            raise Busy(
                f"{self.target}: another command is writing it. Wait for it to finish, or choose another target."
            ) from None
        try:
            self._put_back()
            yield
        finally:
            lock.release()
            self._remove_empty()

    def _refuse_links(self) -> None:
        for path in (self.path, *self.path.iterdir()):
            if path.is_symlink():
                raise MassError(f"{path}: is a link, which no command makes here. Remove it.")

    def _put_back(self) -> None:
        """Restore what an interrupted command had moved aside."""
        if self.moved.is_dir() and not self.target.exists():
            self.moved.rename(self.target)

    def fresh_result(self) -> Path:
        """The folder of the result, with nothing in it."""
        if self.result.exists():
            shutil.rmtree(self.result)
        self.result.mkdir()
        return self.result

    def publish(self, *, replacing: bool) -> None:
        """Make the complete result the target, once all of it is on the disk; then tidy up.

        Args:
            replacing: whether what is at the target makes way. If not, an empty folder may be there and nothing else.
        """
        sync_tree(self.result)
        if not replacing or not self.target.exists():
            with suppress(FileNotFoundError):
                self.target.rmdir()
            self.result.rename(self.target)
        elif not exchange(self.result, self.target):
            self._replace_in_two_steps()
        sync_folder(self.path)
        sync_folder(self.target.parent)
        self.discard()

    def _replace_in_two_steps(self) -> None:
        """Killed in between, the next command of this kind gives the target back what it was."""
        if self.moved.exists():
            raise MassError(
                f"{self.moved}: is what was at {self.target} when a command was interrupted, and something else "
                "is there now. "
                "Move one of the two elsewhere."
            )
        self.target.rename(self.moved)
        self.result.rename(self.target)
        self.moved.rename(self.result)

    def discard(self) -> None:
        """Remove the result, and the folder if nothing else is in it; the lock goes last because it is still held."""
        self._put_back()
        shutil.rmtree(self.result, ignore_errors=True)
        if self.path.is_dir() and {path.name for path in self.path.iterdir()} <= {_LOCK}:
            with suppress(OSError):  # Windows removes no open file; there the lock goes when it is released
                (self.path / _LOCK).unlink(missing_ok=True)
            self._remove_empty()

    def _remove_empty(self) -> None:
        with suppress(OSError):  # something is kept, another command may have come, or folders above are in use
            for folder in (self.path, *self._made):
                folder.rmdir()


@contextmanager
def in_words(work: Path) -> Iterator[None]:
    """Errors of the disk in words."""
    try:
        yield
    except OSError as error:
        raise MassError(_words(error, work)) from error


def _words(error: OSError, work: Path) -> str:
    """What happened to the disk during a command, and what to do."""
    if isinstance(error.filename, str) and is_address(error.filename):
        return f"{error.filename}: cannot be read or written ({error.strerror}). Run the same command to resume."
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes | os.PathLike) else work
    ours = path.parent == work.parent or path.is_relative_to(work) or work.is_relative_to(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{work}: the disk is full. Free some space and run the same command to resume."
    if isinstance(error, FileNotFoundError):
        return f"{path}: disappeared during the run. Restore it and run the same command to resume."
    if error.errno in (errno.EBUSY, errno.EXDEV):
        return f"{path}: cannot be replaced because it is a mount point. Work on a copy of it in another folder."
    if error.errno == errno.ENOTEMPTY:
        return f"{path}: something was created there during the run. Move it elsewhere and run the same command again."
    if isinstance(error, FileExistsError | NotADirectoryError):
        file = next((p for p in (work, *work.parents) if p.exists() and not p.is_dir()), path)
        return f"{path}: cannot be created because {file} is not a folder. Choose another target."
    if ours:
        return f"{path}: cannot be written ({error.strerror or error}). Choose another target."
    return f"{path}: cannot be read ({error.strerror})."
