"""Files and folders that appear whole or not at all, and last through a loss of power."""

from __future__ import annotations

import ctypes
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """A draft beside a file, which takes its place when all went well, and goes away when not.

    The draft's name is its own: two writers of one file never write to the same draft.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.draft")
    try:
        yield draft
        _sync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def drafted_folder(path: Path) -> Iterator[Path]:
    """The same for a folder that is not there yet, or empty."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.draft")
    try:
        draft.mkdir(parents=True)
        yield draft
        sync_tree(draft)
        if path.is_dir():
            path.rmdir()
        draft.rename(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file; what was there stays until the new one is whole."""
    with drafted(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="\n")


def sync_tree(folder: Path) -> None:
    """Bring every file and folder to the disk, so that a rename afterwards cannot come before them."""
    for place, _, names in os.walk(folder):
        for path in (Path(place) / name for name in names):
            if not path.is_symlink():  # which may lead nowhere
                _sync(path)
        sync_folder(Path(place))


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk. Windows opens no folders, and keeps names in its journal."""
    with suppress(PermissionError):
        _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)  # Windows only syncs what it may write
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_tree(source: Path, target: Path, leave_out: Iterable[str]) -> None:
    """Fill a folder with the files of another by hard links, so that gigabytes need no copy; copies where there are none.

    Args:
        source: the folder.
        target: the folder to fill.
        leave_out: names in `source` itself that are left out.
    """
    gone = set(leave_out)

    def ignored(place: str, names: list[str]) -> set[str]:
        """What is left out of a folder: something of the top one only."""
        return gone & set(names) if Path(place) == source else set()

    shutil.copytree(source, target, symlinks=True, ignore=ignored, copy_function=_link_or_copy, dirs_exist_ok=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders trade places in one step; False where the system or the file system cannot."""
    try:
        call = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    return bool(call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
