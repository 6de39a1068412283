"""Links in folders that others have made: which of them may be followed."""

from __future__ import annotations

import os
from pathlib import Path


def stays_inside(root: Path, name: str) -> bool:
    """Whether a path from a folder, itself no link, lies within it after symbolic links too.

    The one exception is the hub's cache: there the files of a snapshot are links to where the contents of all are kept.
    """
    try:
        place = os.path.realpath(root / name)  # Path.resolve makes two paths more, which shows with thousands of files
    except UnicodeEncodeError:  # of characters that no name can have
        return False
    if place.startswith(f"{root}{os.sep}"):
        return True
    return Path(place).parent in map(hub_blobs, (root, *root.parents))  # the root may be a folder of a snapshot


def hub_blobs(folder: Path) -> Path | None:
    """Where the hub's cache keeps the contents of files, if the folder is a snapshot of that cache."""
    snapshots = folder.resolve().parent
    blobs = snapshots.parent / "blobs"
    return blobs if snapshots.name == "snapshots" and blobs.is_dir() else None
