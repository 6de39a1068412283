"""Addresses such as `s3://bucket/model`: what one is, and what every use of a store shares. Reads no file."""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeVar

from massmerge.errors import InputError, MassError
from massmerge.io.hub import first_line, is_repository

_T = TypeVar("_T")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://(.+)", re.DOTALL)
WAITS = (0.1, 0.4, 1.6, 5.0)
"""Seconds between attempts. Stores ask their clients to slow down and drop connections; both pass."""


class StoreError(OSError):
    """A store that failed as often as it was asked; a worker elsewhere may do better."""


def is_address(text: str | Path) -> bool:
    """Whether this names a place in a store rather than a path or a hub id."""
    return isinstance(text, str) and _SCHEME.match(text) is not None


def split_address(address: str) -> tuple[str, str]:
    """Protocol and path of an address.

    Raises:
        InputError: the address chains several stores, or leaves its own folder.
    """
    found = _SCHEME.match(address)
    if found is None:
        raise InputError(f"{address}: not an address. Write PROTOCOL://PATH, such as s3://bucket/model.")
    if "::" in address or ".." in PurePosixPath(found[2]).parts:
        raise InputError(f"{address}: an address with `::` or `..` is refused. Name the place itself.")
    return found[1], found[2].rstrip("/")


def join(address: str, *names: str) -> str:
    """The address of something below another."""
    return "/".join([address.rstrip("/"), *names])


def parent(address: str) -> str:
    """The address of the folder that holds something."""
    return address.rstrip("/").rpartition("/")[0]


def hub_id(text: str) -> str | None:
    """The hub id that `hf://me/name` and `hf://me/name@revision` mean; none for files inside, which are read from there."""
    name = text.removeprefix("hf://")
    return name if name != text and is_repository(name) else None


def is_inner_name(name: str) -> bool:
    """Whether a store's name for a file stays below the folder that it was listed in."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and not {"..", "."} & set(parts) and "\\" not in name


def patiently(address: str, action: Callable[[], _T]) -> _T:
    """Do something with a store, again after a pause when it fails.

    Raises:
        InputError: there is no such file, or reading it is not allowed.
        StoreError: it failed five times.
    """
    for wait in (*WAITS, None):
        try:
            return action()
        except (MassError, StoreError):
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise InputError(f"{address}: no such file or folder.") from None
        except PermissionError as error:
            raise InputError(f"{address}: the store refused ({first_line(error)}). Check your credentials.") from None
        except Exception as error:  # clients pass on errors of whatever transport they use
            if wait is None:
                why = f"{first_line(error)}; tried {len(WAITS) + 1} times"
                raise StoreError(errno.EIO, why, address) from error
            time.sleep(wait * random.uniform(0.5, 1.0))  # workers that were slowed down together come back apart
    raise AssertionError("unreachable")
