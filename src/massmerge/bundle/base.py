"""A bundle's base where it is kept by reference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from transformers import PretrainedConfig

from massmerge.bundle.reader import Bundle
from massmerge.checkpoints import Base, find_source, narrow, open_base
from massmerge.checkpoints.skeleton import build
from massmerge.checkpoints.stores import SafetensorsStore
from massmerge.errors import InputError
from massmerge.io.addresses import is_address
from massmerge.io.tensor_file import read_start, tensor_bytes

LARGE = 2_000_000_000
"""Bytes above which a base is kept by reference by default, and known again by a part of it."""


def base_sha256(base: Base) -> str:
    """SHA-256 of a base's tensors in the order of their names: what a bundle that refers to it must find again.

    Of a large base, or one of the hub whose commit stands for its bytes, it is that of each tensor's shape, type and first
    bytes: to read all of it would take longer than all that a merge of adapters, or a load, does besides. Where tensors do
    not lie in the files as they are, the commit takes the place of first bytes.
    """
    commit = None if is_address(base.source.text) else base.source.revision
    if commit is None and not _is_large(base):
        return _digest(base, None)
    if _in_parts(base):
        return _digest(base, lambda name: read_start(base.info(name)))
    return _digest(base, None if commit is None else lambda name: commit.encode())


def _is_large(base: Base) -> bool:
    return sum(base.info(name).nbytes for name in base.slots) > LARGE


def _in_parts(base: Base) -> bool:
    """Whether a part of a tensor can be read: each lies in its file as it is."""
    plain = all(reading.converter is None for reading in base.readings.values())
    return plain and isinstance(base.store, SafetensorsStore)


def _digest(base: Base, marks: Callable[[str], bytes] | None) -> str:
    """SHA-256 of every tensor's shape, type and mark, or without marks of all bytes."""
    digest = hashlib.sha256()
    for name in sorted(base.slots):
        info = base.info(name)
        digest.update(name.encode() if marks is None else f"{name} {info.shape} {info.dtype}".encode())
        digest.update(tensor_bytes(base.read(name)) if marks is None else marks(name))
    return digest.hexdigest()


def referenced_base(bundle: Bundle, config: PretrainedConfig, *, check: bool) -> Base:
    """The base that a bundle refers to, opened where its manifest says.

    Raises:
        InputError: it is not there, or (with `check`) is not the one that was merged.
    """
    said = bundle.manifest["base"]
    try:
        base = narrow(
            open_base(find_source(said["location"], Path(), download=True, whole=True)), build(config, said["class"])
        )
    except InputError as error:
        raise InputError(f"{bundle.path}: its base is stored by reference and is not available: {error}") from None
    if check and base_sha256(base) != said["sha256"] and not _known_by_all_bytes(base, said["sha256"]):
        raise InputError(f"{bundle.path}: its base, {said['location']}, has changed since the merge. Merge again.")
    return base


def _known_by_all_bytes(base: Base, sha256: str) -> bool:
    """Whether a bundle of an earlier version, which took all bytes where the commit is taken now, means this base."""
    return not (_is_large(base) and _in_parts(base)) and _digest(base, None) == sha256
