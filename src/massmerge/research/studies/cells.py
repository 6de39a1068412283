"""Finished pieces of a study on disk, so that an interrupted study can resume."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def checksum(about: Any) -> str:
    """SHA-256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(about, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


class Cells:
    """Values by the checksum of everything that determines them, a JSON line each.

    Lines are only ever added. A line that a killed run left half-written is passed over, and its value is computed again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, tuple[Any, float]] = {}
        self._begun = True
        if path.is_file():
            content = path.read_bytes()
            self._begun = content.endswith(b"\n") or not content
            for line in content.splitlines():
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            cell = json.loads(line)
            self._known[cell["key"]] = (cell["value"], float(cell["seconds"]))
        except (ValueError, KeyError, TypeError):
            return  # cut off in the middle

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key][0]

    def seconds(self, key: str) -> float:
        """How long a value took when it was computed."""
        return self._known[key][1]

    def put(self, key: str, value: Any, seconds: float = 0.0) -> Any:
        """Keep a value; returns it as it will be read again, so that a first run and a resumed one see the same."""
        line = json.dumps({"key": key, "value": value, "seconds": round(seconds, 3)}, ensure_ascii=False)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("" if self._begun else "\n") + line + "\n")
        self._begun = True
        self._known[key] = (json.loads(line)["value"], seconds)
        return self._known[key][0]
