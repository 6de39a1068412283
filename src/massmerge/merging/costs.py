"""What a merge takes: bytes of its files, memory, time. Bounds and estimates, before any weight is read."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from massmerge.io.tensor_file import TensorInfo, header_bytes
from massmerge.merging.ranks import MatrixSize

if TYPE_CHECKING:
    from massmerge.merging.open_recipe import OpenedRecipe
    from massmerge.merging.plan import Plan, Sizes, TensorPlan

# Rough speeds of one core, for the estimate of time: products and the partial eigensolver, in operations a second.
_PRODUCT_SPEED, _EIGEN_SPEED, _DISK_SPEED = 60e9, 12e9, 400e6
_ENTRY_SECONDS = 8e-9  # to read a number of an expert, subtract the base's and add up
FACTORED = ("mass", "tsv_m", "tsv_c")
"""Methods that take each task's factors; others read deltas, which costs little."""
_LIBRARIES = 500_000_000  # resident memory of the interpreter with torch and transformers


def peak_memory(matrices: list[TensorPlan], whole: list[TensorPlan], workers: int) -> int:
    """Each worker holds one tensor of base and expert, their difference in float32, and the factors of all tasks."""
    largest = sorted((tensor_memory(t) for t in (*matrices, *whole)), reverse=True)[:workers]
    return _LIBRARIES + sum(largest)


def tensor_memory(tensor: TensorPlan, *, task_only: bool = False) -> int:
    """Bytes that a worker holds for a tensor of all tasks, or of one alone."""
    ranks = max(tensor.ranks) if task_only else sum(tensor.ranks)
    factors = ranks * sum(tensor.matrix) * 4 if tensor.matrix else 0
    solver = 3 * min(tensor.matrix) ** 2 * 8 if tensor.matrix else 0
    return 4 * math.prod(tensor.shape) * 4 + 2 * factors + solver


def task_seconds(tensor: TensorPlan, plan: Plan, task: str) -> float:
    """What one core takes for one task's share of a tensor."""
    form, rank = next((t.form, r) for t, r in zip(plan.tasks, tensor.ranks, strict=True) if t.name == task)
    if tensor.matrix is None or plan.method not in FACTORED:
        return math.prod(tensor.shape) * _ENTRY_SECONDS
    m, n = tensor.matrix
    if form == "adapter":
        return 8 * (m + n) * rank**2 / _PRODUCT_SPEED
    small = min(m, n)
    return 2 * m * n * small / _PRODUCT_SPEED + 1.4 * small**3 / _EIGEN_SPEED


def tensor_seconds(tensor: TensorPlan, plan: Plan) -> float:
    """What one core takes for a tensor of all tasks."""
    used = [task.name for task, rank in zip(plan.tasks, tensor.ranks, strict=True) if rank]
    together = 2 * sum(tensor.ranks) ** 2 * sum(tensor.matrix) / _PRODUCT_SPEED if tensor.matrix else 0.0
    own = sum(task_seconds(tensor, plan, task) for task in used)
    return own + (together if plan.method in FACTORED else 0.0)


def look_seconds(tensor: TensorPlan, plan: Plan) -> float:
    """What one core takes for one look at a tensor of all tasks."""
    return math.prod(tensor.shape) * _ENTRY_SECONDS * sum(rank > 0 for rank in tensor.ranks)


def write_seconds(nbytes: int) -> float:
    """What one core takes to put a file together and to work out its checksum."""
    return 3 * nbytes / _DISK_SPEED


def merge_seconds(matrices: list[TensorPlan], sizes: Sizes, workers: int) -> float:
    """A rough time: operations by the speed of one core, bytes by the speed of a disk."""
    total = 0.0
    for t in matrices:
        assert t.matrix is not None
        m, n = t.matrix
        small = min(m, n)
        used = [k for k in t.ranks if k]
        total += sum(2 * m * n * small / _PRODUCT_SPEED + 1.4 * small**3 / _EIGEN_SPEED for _ in used)
        total += 2 * (sum(used) ** 2) * (m + n) / _PRODUCT_SPEED
    return round(total / workers + 3 * sizes.counted / _DISK_SPEED + 0.5, 1)


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
    return manifest + statistics + card + recipe + config + files
