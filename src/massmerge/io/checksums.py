"""Checksums of files."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import xxhash

_CHUNK = 1 << 22  # between pieces a thread waits for the interpreter, which may be busy with something else


def file_sha256(path: Path, start: bytes = b"") -> str:
    """SHA-256 of a file, read in pieces, or of some bytes and the file after them."""
    with path.open("rb") as file:
        return sha256_of(file, start)


def sha256_of(file: BinaryIO, start: bytes = b"", between: Callable[[], object] = lambda: None) -> str:
    """SHA-256 of an open file, read from its start in pieces, or of some bytes and the file after them.

    Args:
        file: the file.
        start: the bytes.
        between: called after each piece.
    """
    # One buffer, no larger than the file: new pages cost as much as reading.
    size = file.seek(0, os.SEEK_END)
    digest, buffer = hashlib.sha256(start), memoryview(bytearray(max(1, min(size, _CHUNK))))
    file.seek(0)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        digest.update(buffer[:count])
        between()
    return digest.hexdigest()


def xxh128_of(file: BinaryIO) -> str:
    """XXH128 of an open file: finds accidents in a tenth of the time that SHA-256 takes.

    One call takes the whole file, and other threads run during it. With a call for each piece of it, this thread would wait
    for the interpreter as often.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return xxhash.xxh128_hexdigest(mapped)
