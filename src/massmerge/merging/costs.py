"""What a merge takes: bytes of its files, memory, time. Bounds and estimates, before any weight is read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from massmerge.io.shards import cut
from massmerge.io.tensor_file import TensorInfo, header_bytes
from massmerge.merging.ranks import MatrixSize

if TYPE_CHECKING:
    from massmerge.merging.open_recipe import OpenedRecipe
    from massmerge.merging.plan import Sizes, TensorPlan

Limits = Mapping[str, tuple[int, ...]]
"""For each matrix the highest rank that each task's delta can have, 0 for a task that does not change it."""

# Rough speeds of one core, for the estimate of time: products and the partial eigensolver, in operations a second, and files
# that are read or written and hashed, in bytes.
PRODUCT_SPEED, EIGEN_SPEED, DISK_SPEED = 60e9, 12e9, 1e9
THIN_SPEED, TENSOR_SECONDS = 15e9, 3e-4  # QR of thin matrices; reading two tensors and an SVD of a few rows
ENTRY_SECONDS = 4e-9  # to read a number of an expert, subtract the base's and add up
_START = 0.2  # opening sources, and what else every merge does
_LIBRARIES = 500_000_000  # resident memory of the interpreter with torch and transformers


def peak_memory(matrices: list[TensorPlan], whole: list[TensorPlan], limits: Limits, workers: int) -> int:
    """Each worker holds the factors of all tasks of one tensor, and for those that are not adapters base and delta."""

    def held(t: TensorPlan) -> int:
        """Bytes that the work on one tensor holds."""
        factors = sum(t.ranks) * sum(t.matrix) * 4 if t.matrix else 0
        if t.matrix and all(map(_is_thin(t), limits[t.name])):
            return 3 * factors  # as read, their bases, and as stored
        return 4 * math.prod(t.shape) * 4 + 2 * factors + (3 * min(t.matrix) ** 2 * 8 if t.matrix else 0)

    largest = sorted((held(t) for t in (*matrices, *whole)), reverse=True)[:workers]
    return _LIBRARIES + sum(largest)


def merge_seconds(
    matrices: list[TensorPlan], limits: Limits, sizes: Sizes, workers: int, *, base_read: bool = True
) -> float:
    """A rough time: operations by the speed of one core, bytes by the speed of a disk.

    A delta that is known to be thin, as an adapter's, is never formed: what it costs grows with the square of its rank.
    """
    total = 0.0
    for t in matrices:
        assert t.matrix is not None
        m, n = t.matrix
        small, thin = min(m, n), _is_thin(t)
        for limit in filter(None, limits[t.name]):
            if thin(limit):
                total += 6 * (m + n) * limit**2 / THIN_SPEED + TENSOR_SECONDS
            else:
                total += 2 * m * n * small / PRODUCT_SPEED + 1.4 * small**3 / EIGEN_SPEED
                total += 2 * t.nbytes / DISK_SPEED  # an expert is hashed, then read, compared and subtracted
        total += 2 * (sum(t.ranks) ** 2) * (m + n) / PRODUCT_SPEED
    return round(total / workers + 3 * (sizes.counted - (not base_read) * sizes.base) / DISK_SPEED + _START, 1)


def entrywise_seconds(tensors: list[TensorPlan], sizes: Sizes, looks: int, workers: int) -> float:
    """The same of a static merge in which each number goes its own way: nothing is factored.

    Args:
        tensors: all that experts change.
        sizes: what is written.
        looks: how often all of them are looked at before the first is merged.
        workers: how many work at once.
    """
    entries = sum(math.prod(t.shape) * sum(rank > 0 for rank in t.ranks) for t in tensors)
    return round(ENTRY_SECONDS * entries * (1 + looks) / workers + sizes.base / DISK_SPEED + _START, 1)


def _is_thin(t: TensorPlan) -> Callable[[int], bool]:
    assert t.matrix is not None
    return min(t.matrix).__gt__


def entry_bytes(name: str) -> int:
    """About what one more tensor adds to the header of a safetensors file."""
    return len(json.dumps(name)) + 96


def file_bytes(infos: dict[str, TensorInfo]) -> int:
    """Size of a safetensors file with these tensors."""
    return len(header_bytes(infos)) + sum(info.nbytes for info in infos.values())


def rest_bytes(prepared: OpenedRecipe, matrices: list[MatrixSize]) -> int:
    """An upper bound for everything small: manifest with its checksums, statistics, card, recipe, configuration."""
    tasks, names = len(prepared.recipe.tasks), sum(len(x.name) for x in matrices)
    recipe = len(prepared.recipe.dump().encode())
    manifest = 4096 + 1200 * tasks + names + len(matrices) * (16 + 6 * tasks)
    statistics = 1024 + 4 * len(matrices) * (tasks * tasks + 3 * tasks)
    card = 2048 + 100 * tasks + 2 * recipe
    config = len(prepared.base.skeleton.config.to_json_string(use_diff=False).encode())
    files = sum(path.stat().st_size for path in prepared.processor.values())
    return manifest + statistics + card + recipe + config + files + _index_bytes(prepared)


def _index_bytes(prepared: OpenedRecipe) -> int:
    """An upper bound for the index of weights in several files, their headers, and what the manifest says of each."""
    infos = {name: prepared.base.info(name) for name in prepared.base.slots}
    count = len(cut(infos, prepared.recipe.merge.shard_bytes))
    return 512 * count + sum(len(json.dumps(name)) + 48 for name in infos) if count > 1 else 0
