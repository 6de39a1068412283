"""Bundles as an attacker makes them: changed at will, with a manifest and checksums that fit."""

import json
from collections.abc import Callable
from pathlib import Path

from massmerge.bundle.layout import MANIFEST
from massmerge.bundle.manifest import write_manifest


def resign(folder: Path, **changes) -> None:
    """Write the manifest anew, with the checksums of the files as they are now."""
    data = json.loads((folder / MANIFEST).read_text())
    write_manifest(folder, {key: value for key, value in data.items() if key not in ("files", "sha256")} | changes)


def edit(path: Path, change: Callable[[dict], object] | None = None, **fields) -> None:
    """Change a JSON file."""
    data = json.loads(path.read_text()) if path.is_file() else {}
    data.update(fields)
    if change is not None:
        change(data)
    path.write_text(json.dumps(data))
