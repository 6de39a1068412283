"""Finished parts of a merge: a file of tensors each, whose name ends in a checksum of the merge and the file's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from massmerge.io.sealed import SealedFiles
from massmerge.io.tensor_file import TensorInfo, read_header, write_tensors

_SUFFIX = ".safetensors"


class Parts(SealedFiles):
    """The parts of one merge.

    Args:
        folder: where they are.
        fingerprint: what the merge is of.
        names: the file of each part that is finished, by its key.
    """

    def __init__(self, folder: Path, fingerprint: str, names: Mapping[str, str] | None = None) -> None:
        super().__init__(folder, fingerprint)
        self.names: dict[str, str] = dict(names or {})

    def put(self, key: str, tensors: dict[str, Tensor]) -> str:
        """Keep a part; it appears whole or not at all. Returns the name of its file."""
        draft = self.draft()
        write_tensors(draft, tensors)
        self.names[key] = self.seal(draft, key, _SUFFIX)
        return self.names[key]

    def header(self, key: str) -> dict[str, TensorInfo]:
        """What a part holds."""
        return _header(self.folder / self.names[key])


@lru_cache(maxsize=1024)
def _header(path: Path) -> dict[str, TensorInfo]:
    """The header of a part, kept: of a thousand tasks each asks for it, and it has a place for every one of them."""
    return read_header(path)


forget_headers = _header.cache_clear
"""Give up what is kept of parts that nobody reads any more."""


def tensor_key(index: int) -> str:
    """The key of the part that a tensor of the plan becomes."""
    return f"{index:06d}"
