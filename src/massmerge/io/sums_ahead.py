"""Checksums that threads work out while this process imports libraries, which keeps one core busy for seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Event

from massmerge.io.checksums import sha256_of
from massmerge.io.stamps import Stamp, file_stamp, is_recent

_THREADS = 2
_ahead: ContextVar[dict[tuple[Path, Stamp], Future[str]]] = ContextVar("_ahead")


class _Ended(Exception):
    """Nobody asks any more."""


@contextmanager
def sums_ahead(paths: Iterable[Path]) -> Iterator[None]:
    """Begin with the SHA-256 of these files; `sum_ahead` gives it inside. Files that were just written are left out."""
    ended = Event()

    def sum_of(path: Path) -> str:
        """The sum of a file, unless the work ends first."""

        def go_on() -> None:
            """Stop where the sum is no longer asked for."""
            if ended.is_set():
                raise _Ended

        with path.open("rb", buffering=0) as file:
            return sha256_of(file, between=go_on)

    stamps = {path: file_stamp(path) for path in paths}
    pool = ThreadPoolExecutor(_THREADS, "sums")
    begun = {(path, stamp): pool.submit(sum_of, path) for path, stamp in stamps.items() if not is_recent(stamp)}
    token = _ahead.set(begun)
    try:
        yield
    finally:
        _ahead.reset(token)
        ended.set()
        pool.shutdown(cancel_futures=True)


def sum_ahead(path: Path, stamp: Stamp) -> str | None:
    """The checksum of a file with this stamp, once it is there; none if nobody has begun with it."""
    begun = _ahead.get({}).get((path, stamp))
    if begun is None or begun.cancel():  # those that still wait for a thread are left to who asks
        return None
    try:
        return begun.result()
    except OSError:
        return None  # who reads the file next will say so
