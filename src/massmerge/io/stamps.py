"""What changes with every write to a file, so that its bytes need not be read again to know that they are the same."""

from __future__ import annotations

import os
import time
from pathlib import Path

Stamp = tuple[int, int, int]
# Two writes within these nanoseconds may have the same time: some file systems count by two seconds.
_COARSE = 2_000_000_000


def file_stamp(path: Path) -> Stamp:
    """Size and times. No inode number, which some network file systems make up anew; on Windows no time of a change."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns if os.name == "posix" else 0


def is_recent(stamp: Stamp) -> bool:
    """Whether a file was written so shortly ago that another write could leave the same stamp."""
    return 0 <= time.time_ns() - max(stamp[1:]) < _COARSE
