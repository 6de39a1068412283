"""A bundle's base where it is kept by reference."""

from __future__ import annotations

import hashlib
from pathlib import Path

from transformers import PretrainedConfig

from massmerge.bundle.reader import Bundle
from massmerge.checkpoints import Base, find_source, narrow, open_base
from massmerge.checkpoints.skeleton import build
from massmerge.checkpoints.stores import SafetensorsStore
from massmerge.errors import InputError
from massmerge.io.tensor_file import read_start, tensor_bytes

LARGE = 2_000_000_000
"""Bytes above which a base is kept by reference by default, and known again by a part of it."""


def base_sha256(base: Base) -> str:
    """SHA-256 of a base's tensors in the order of their names: what a bundle that refers to it must find again.

    Of a large base it is that of each tensor's shape, type and first bytes: to read all of it would take longer than all
    that a merge of adapters, or a load, does besides.
    """
    digest = hashlib.sha256()
    parts = all(reading.converter is None for reading in base.readings.values()) and isinstance(
        base.store, SafetensorsStore
    )
    sampled = parts and sum(base.info(name).nbytes for name in base.slots) > LARGE
    for name in sorted(base.slots):
        info = base.info(name)
        digest.update(f"{name} {info.shape} {info.dtype}".encode() if sampled else name.encode())
        digest.update(read_start(info) if sampled else tensor_bytes(base.read(name)))
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
    if check and base_sha256(base) != said["sha256"]:
        raise InputError(f"{bundle.path}: its base, {said['location']}, has changed since the merge. Merge again.")
    return base
