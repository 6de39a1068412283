"""Files whose names say what they are of and what their bytes are: written once or twice, a name has one content."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from massmerge.io.checksums import file_sha256

_NAME = re.compile(r"(\w[\w.]*)-[0-9a-f]{64}\.\w+")


class SealedFiles:
    """Finished files in a folder that all workers see.

    A file counts when it stands under its final name, which ends in a checksum. Whoever makes it again from the same input
    gives it the same name, and a file that a loss of power has spoilt is told from a whole one.

    Args:
        folder: where they are.
        mark: what they belong to. It is sealed into the names, so nothing else takes them for its own.
    """

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder, self._mark = folder, mark

    def draft(self) -> Path:
        """A file that nobody else writes, and that counts for nothing under this name."""
        return self.folder / f"{uuid.uuid4().hex}.draft"

    def seal(self, draft: Path, key: str, suffix: str) -> str:
        """Give a draft its final name, which is returned."""
        # Not synced: a file that a loss of power has spoilt does not match its name, and is made again.
        name = self._sealed(draft, key, suffix)
        draft.replace(draft.with_name(name))
        return name

    def whole(self, path: Path) -> str | None:
        """The key of a file whose bytes are those that its name tells; none for any other file."""
        key = key_of(path)
        return key if key is not None and self._sealed(path, key, path.suffix) == path.name else None

    def find(self, key: str, suffix: str) -> str | None:
        """The name of a whole file with this key, if there is one."""
        found = sorted(self.folder.glob(f"{key}-*{suffix}"))
        return next((path.name for path in found if self.whole(path) == key), None)

    def _sealed(self, path: Path, key: str, suffix: str) -> str:
        return f"{key}-{file_sha256(path, self._mark.encode())}{suffix}"


def key_of(path: Path) -> str | None:
    """The key in a file's name; none for drafts and strangers."""
    found = _NAME.fullmatch(path.name)
    return found[1] if found else None
