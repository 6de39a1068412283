"""Inputs that wait for their turn, on disk."""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from pathlib import Path
from typing import Any

from massmerge.errors import InputError
from massmerge.io.rows import picture


class Spool:
    """Inputs on disk, to be read in any order: memory does not grow with their number."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="mass-eval-")  # noqa: SIM115 - lives as long as the spool
        self._ends = array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, item: Any) -> None:
        """Put an input behind the others."""
        self._file.seek(0, os.SEEK_END)
        self._file.write(packed(item))
        self._ends.append(self._file.tell())

    def size(self, place: int) -> int:
        """Bytes of an input."""
        return self._ends[place + 1] - self._ends[place]

    def __getitem__(self, place: int) -> Any:
        """An input as a model takes it; an error where it cannot be read."""
        return unpacked(self._packed(place))

    def stored(self, place: int) -> Any:
        """An input as it was added: an image as its bytes."""
        found = self._packed(place)
        return found[1:] if found[:1] == b"b" else unpacked(found)

    def content(self, place: int) -> bytes:
        """The bytes that an input consists of: of a path those of its file."""
        found = self._packed(place)
        item = unpacked(found) if found[:1] == b"p" else None
        return item.read_bytes() if item is not None and item.is_file() else found

    def _packed(self, place: int) -> bytes:
        self._file.seek(self._ends[place])
        return self._file.read(self.size(place))


def packed(item: Any) -> bytes:
    """An input as bytes, the first of which tells its kind.

    An image's own bytes, a path, a text, two texts, messages or an error.
    """
    if isinstance(item, bytes):
        return b"b" + item
    kind = (
        "p"
        if isinstance(item, Path)
        else "e"
        if isinstance(item, Exception)
        else "m"
        if isinstance(item, list)
        else "t"
    )
    return kind.encode() + json.dumps(item if isinstance(item, str | tuple | list) else str(item)).encode()


def unpacked(data: bytes) -> Any:
    """The input again, as a model takes it; an error where it cannot be read."""
    kind, rest = data[:1], data[1:]
    if kind == b"b":
        return picture(rest, Path())
    item = json.loads(rest)
    if kind == b"t":
        return tuple(item) if isinstance(item, list) else item
    if kind == b"m":
        return item
    return Path(item) if kind == b"p" else InputError(item)
