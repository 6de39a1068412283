"""Finished parts of a merge: a file of tensors each, whose name ends in a checksum of the merge and the file's bytes."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from massmerge.io.checksums import file_sha256
from massmerge.io.tensor_file import TensorInfo, read_header, write_tensors

_NAME = re.compile(r"(\w[\w.]*)-[0-9a-f]{64}\.safetensors")


class Parts:
    """The parts of one merge in a folder that all its workers see.

    A part counts when it stands under its final name. That name says what the part is of and what its bytes are, so whoever
    makes it again writes the same file, and a part that a loss of power has spoilt is told from a whole one.

    Args:
        folder: where they are.
        fingerprint: what the merge is of. It is sealed into the names, so no other merge takes them for its own.
        names: the file of each part that is finished, by its key.
    """

    def __init__(self, folder: Path, fingerprint: str, names: Mapping[str, str] | None = None) -> None:
        self.folder, self._fingerprint = folder, fingerprint
        self.names: dict[str, str] = dict(names or {})

    def put(self, key: str, tensors: dict[str, Tensor]) -> str:
        """Keep a part; it appears whole or not at all. Returns the name of its file."""
        draft = self.draft()
        write_tensors(draft, tensors)
        # Not synced: a part that a loss of power has spoilt does not match its name, and is made again.
        name = self._sealed(draft, key)
        draft.replace(draft.with_name(name))
        self.names[key] = name
        return name

    def draft(self) -> Path:
        """A file that nobody else writes, and that counts for nothing under this name."""
        return self.folder / f"{uuid.uuid4().hex}.draft"

    def header(self, key: str) -> dict[str, TensorInfo]:
        """What a part holds."""
        return read_header(self.folder / self.names[key])

    def whole(self, path: Path) -> str | None:
        """The key of a part whose bytes are those that its name tells; none for any other file."""
        key = key_of(path)
        return key if key is not None and self._sealed(path, key) == path.name else None

    def _sealed(self, path: Path, key: str) -> str:
        return f"{key}-{file_sha256(path, self._fingerprint.encode())}.safetensors"


def key_of(path: Path) -> str | None:
    """The key in a part's name; none for drafts and strangers."""
    found = _NAME.fullmatch(path.name)
    return found[1] if found else None


def tensor_key(index: int) -> str:
    """The key of the part that a tensor of the plan becomes."""
    return f"{index:06d}"
