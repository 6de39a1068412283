"""What a merge will do, as plain data: tensors, ranks, bytes, memory, time, problems."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from massmerge.checkpoints.skeleton import Kind
from massmerge.errors import Problem

# Rough speeds of one core, for the estimate of time: products and the partial eigensolver, in operations a second.
_PRODUCT_SPEED, _EIGEN_SPEED, _DISK_SPEED = 60e9, 12e9, 400e6
_LIBRARIES = 500_000_000  # resident memory of the interpreter with torch and transformers


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the backbone: whether it gets factors, and of which ranks."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    matrix: tuple[int, int] | None
    """Rows and columns of the factored matrix; none for a tensor that is stored whole where it differs."""
    ranks: tuple[int, ...]
    """Rank for each task in order, 0 where the task does not touch it; for a tensor stored whole, 1 where it does."""
    in_base: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return math.prod(self.shape) * _itemsize(self.dtype)


@dataclass(frozen=True)
class TaskPlan:
    """One task: where it comes from and what of it goes into the bundle."""

    name: str
    source: str
    revision: str | None
    form: str
    """`full` for a checkpoint, `adapter` for LoRA."""
    labels: tuple[str, ...] | None
    head: str
    """Class that runs the head, `linear`, or `none`."""
    factor_bytes: int
    whole_bytes: int
    head_bytes: int
    apart_bytes: int = 0
    """What the expert weighs by itself, without its head: a full one as much as the base."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of what is written."""

    base: int
    factors: int
    whole: int
    fixed: int
    rest: int
    """Manifest, statistics, card, recipe, processor, configuration."""
    heads: int

    @property
    def counted(self) -> int:
        """All but the heads: what the budget speaks of."""
        return self.base + self.factors + self.whole + self.fixed + self.rest

    @property
    def ratio(self) -> float:
        """All but the heads, as a multiple of the base."""
        return self.counted / self.base


@dataclass(frozen=True)
class Plan:
    """What a merge will do."""

    method: str
    base: str
    base_class: str
    base_revision: str | None
    tasks: tuple[TaskPlan, ...]
    tensors: tuple[TensorPlan, ...]
    sizes: Sizes
    ranks_exact: bool
    """False where ranks depend on weights that were not read: by a share of energy, or not downloaded yet."""
    peak_memory: int
    seconds: float
    problems: tuple[Problem, ...]
    left_out: tuple[str, ...] = ()
    """Tasks whose experts could not be opened; no figure speaks of them."""

    @property
    def matrices(self) -> list[TensorPlan]:
        """The tensors that get factors."""
        return [t for t in self.tensors if t.matrix is not None]

    @property
    def errors(self) -> list[Problem]:
        """Problems that forbid the merge."""
        return [p for p in self.problems if p.level == "error"]

    @property
    def apart(self) -> int:
        """Bytes of the experts as they are, heads not counted; adapters need the base beside them."""
        adapters = any(task.form == "adapter" for task in self.tasks)
        return sum(task.apart_bytes for task in self.tasks) + self.sizes.base * adapters

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for `--json` and for comparing two plans."""
        data = asdict(self)
        data["sizes"] |= {"counted": self.sizes.counted, "ratio": round(self.sizes.ratio, 4), "apart": self.apart}
        return json.loads(json.dumps(data))


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def peak_memory(matrices: list[TensorPlan], whole: list[TensorPlan], workers: int) -> int:
    """Each worker holds one tensor of base and expert, their difference in float32, and the factors of all tasks."""

    def held(t: TensorPlan) -> int:
        count = math.prod(t.shape)
        factors = sum(t.ranks) * sum(t.matrix) * 4 if t.matrix else 0
        return 4 * count * 4 + 2 * factors + (3 * min(t.matrix) ** 2 * 8 if t.matrix else 0)

    largest = sorted((held(t) for t in (*matrices, *whole)), reverse=True)[:workers]
    return _LIBRARIES + sum(largest)


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
