"""What the units of a merge take: memory that an engine must find for them, seconds by which they are cut and ordered."""

from __future__ import annotations

import math

from massmerge.merging.costs import DISK_SPEED, EIGEN_SPEED, ENTRY_SECONDS, PRODUCT_SPEED, TENSOR_SECONDS, THIN_SPEED
from massmerge.merging.plan import Plan, TensorPlan

FACTORED = ("mass", "tsv_m", "tsv_c")
"""Methods that take each task's factors; others read deltas, which costs little."""


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
        return math.prod(tensor.shape) * ENTRY_SECONDS
    m, n = tensor.matrix
    if form == "adapter":
        return 6 * (m + n) * rank**2 / THIN_SPEED + TENSOR_SECONDS
    small = min(m, n)
    return 2 * m * n * small / PRODUCT_SPEED + 1.4 * small**3 / EIGEN_SPEED


def tensor_seconds(tensor: TensorPlan, plan: Plan) -> float:
    """What one core takes for a tensor of all tasks."""
    used = [task.name for task, rank in zip(plan.tasks, tensor.ranks, strict=True) if rank]
    together = 2 * sum(tensor.ranks) ** 2 * sum(tensor.matrix) / PRODUCT_SPEED if tensor.matrix else 0.0
    own = sum(task_seconds(tensor, plan, task) for task in used)
    return own + (together if plan.method in FACTORED else 0.0)


def look_seconds(tensor: TensorPlan) -> float:
    """What one core takes for one look at a tensor of all tasks."""
    return math.prod(tensor.shape) * ENTRY_SECONDS * sum(rank > 0 for rank in tensor.ranks)


def write_seconds(nbytes: int) -> float:
    """What one core takes to put a file together and to work out its checksum."""
    return 3 * nbytes / DISK_SPEED
