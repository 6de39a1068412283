"""How many singular triplets each matrix keeps, and what that weighs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from massmerge.bundle.encoding import SMALL_SIDE, part_shapes

_NARROW = 64  # rows or columns below which a matrix weighs next to nothing
_HEADER_ENTRY = 96  # of a safetensors header, without the tensor's name; numbers of up to 12 digits


@dataclass(frozen=True)
class MatrixSize:
    """One matrix of the base, as far as ranks need to know."""

    name: str
    m: int
    n: int
    stored: torch.dtype
    """The type of the factors' numbers."""
    limits: tuple[int, ...]
    """The highest rank that each task's delta can have; 0 for a task that does not touch the matrix."""


def too_small(matrix: tuple[int, int], tasks: int) -> bool:
    """Whether a narrow matrix has fewer rows or columns than there are tasks, and so not one direction for each.

    TSV-M cannot make such directions orthogonal, and `1/T` of the rank is none. These matrices (BERT's two token types)
    weigh next to nothing: each task's is stored whole, and merges take the mean, whatever the rule for ranks. Wider ones
    do weigh: with a thousand adapters of a base that is 768 wide each task has one direction, at least.
    """
    return min(matrix) < min(tasks, _NARROW)


def factor_bytes(matrix: MatrixSize, k: int) -> int:
    """Bytes of the factors at rank k, their entries in the file's header included."""
    if k == 0:
        return 0
    parts = part_shapes((matrix.m, matrix.n), k, matrix.stored).values()
    data = sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
    return data + len(parts) * (len(json.dumps(matrix.name)) + _HEADER_ENTRY)


def core_bytes(matrix: MatrixSize, ranks: Sequence[int]) -> int:
    """Bytes of the fixed model's core matrix (float32), at most: the filter can only make it smaller."""
    return sum(ranks) ** 2 * 4 + len(json.dumps(matrix.name)) + _HEADER_ENTRY if any(ranks) else 0


def total_bytes(matrices: Sequence[MatrixSize], ranks: Mapping[str, Sequence[int]], *, fixed: bool) -> int:
    """Bytes of all factors, and of the fixed model's cores if it is stored."""
    return sum(
        sum(tasks * factor_bytes(m, k) for k, tasks in Counter(ranks[m.name]).items())
        + (core_bytes(m, ranks[m.name]) if fixed else 0)
        for m in matrices
    )


def ranks_by_share(matrices: Sequence[MatrixSize], share: float) -> dict[str, tuple[int, ...]]:
    """Ranks at which every matrix's factors weigh about `share` of the matrix itself, all tasks together.

    `k ≈ share · mn / ((m + n + 1) T)`: the same share of bytes for each matrix, whatever its shape. The paper's `d/T`
    gives square matrices twice their weight.
    """
    tasks = len(matrices[0].limits) if matrices else 1
    wanted = {
        x.name: max(
            1, min(x.m, x.n) if min(x.m, x.n) <= SMALL_SIDE else int(share * x.m * x.n / ((x.m + x.n + 1) * tasks))
        )
        for x in matrices
    }
    return {x.name: tuple(min(wanted[x.name], limit) for limit in x.limits) for x in matrices}


def ranks_by_budget(matrices: Sequence[MatrixSize], budget: int, *, fixed: bool) -> dict[str, tuple[int, ...]]:
    """The highest ranks whose factors weigh at most `budget` bytes; 1 a matrix where even that is too much."""
    low, high = 0.0, 1.0
    while high < 4096 and total_bytes(matrices, ranks_by_share(matrices, high), fixed=fixed) <= budget:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        if total_bytes(matrices, ranks_by_share(matrices, middle), fixed=fixed) <= budget:
            low = middle
        else:
            high = middle
    return ranks_by_share(matrices, low)


def ranks_by_rule(matrices: Sequence[MatrixSize], rule: str | int | float) -> dict[str, tuple[int, ...]]:
    """Ranks by the recipe's `rank`: `1/T` of the full rank, a number, or (below 1) as many as a share of energy needs.

    For a share of energy the rank is known only from the weights; what is given here is its upper bound.
    """

    def rank(x: MatrixSize) -> int:
        """The rule's rank of a matrix."""
        if rule == "1/T":
            return max(1, min(x.m, x.n) // len(x.limits))
        return int(rule) if isinstance(rule, int) else min(x.m, x.n)

    return {x.name: tuple(min(rank(x), limit) for limit in x.limits) for x in matrices}
