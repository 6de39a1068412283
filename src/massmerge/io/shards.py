"""Weights in several files: their names and their index, as transformers writes and reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from massmerge.errors import InputError, listing
from massmerge.io.json_file import read_json

if TYPE_CHECKING:  # names of files are asked for where torch is not needed
    from massmerge.io.tensor_file import TensorInfo

STEM = "model"
_MOST_SHARDS = 10_000
WEIGHTS = f"{STEM}.safetensors"
INDEX = ".index.json"
"""What the name of an index ends in, behind that of weights that are not cut."""


def cut(infos: Mapping[str, TensorInfo], most: int) -> dict[str, tuple[str, ...]]:
    """Which tensors each file of weights holds, by its name: one file if that is small enough.

    Args:
        infos: the tensors, in the order in which they are written.
        most: bytes of tensors in a file. A tensor that is larger has a file of its own, for none is cut.
    """
    groups: list[list[str]] = [[]]
    held = 0
    for name, info in infos.items():
        if groups[-1] and held + info.nbytes > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += info.nbytes
    if len(groups) == 1:
        return {WEIGHTS: tuple(groups[0])}
    return {f"{STEM}-{i:05d}-of-{len(groups):05d}.safetensors": tuple(group) for i, group in enumerate(groups, 1)}


def index_text(files: Mapping[str, tuple[str, ...]], infos: Mapping[str, TensorInfo]) -> str:
    """The index of weights in several files."""
    places = {name: file for file, names in files.items() for name in names}
    size = sum(infos[name].nbytes for name in places)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2, sort_keys=True) + "\n"


def shard_names(index: Path) -> list[str]:
    """The files that an index names, which must lie beside it.

    Raises:
        InputError: it cannot be read, or names none, or files elsewhere.
    """
    try:
        names = sorted({str(name) for name in read_json(index)["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: not a weight index ({error!r}). Download or save the checkpoint again.") from None
    if not names:
        raise InputError(f"{index}: names no shards. Download or save the checkpoint again.")
    if len(names) > _MOST_SHARDS:  # each would be asked for
        raise InputError(f"{index}: names {len(names):,} shards; the maximum is {_MOST_SHARDS:,}.")
    if elsewhere := [name for name in names if Path(name).name != name or name == ".."]:
        raise InputError(f"{index}: names a shard outside of its folder:{listing(elsewhere, 5)}")
    return names
