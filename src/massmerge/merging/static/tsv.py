"""Task singular vectors (Gargiulo et al., 2025): TSV-M, one delta of all tasks; TSV-C, each task's own, compressed."""

from __future__ import annotations

from torch import Tensor

from massmerge.linalg.factors import Factors, tsv_merge
from massmerge.merging.static.deltas import Deltas


def tsv_m(deltas: Deltas) -> Tensor:
    """The tasks' factors side by side, both bases replaced by their polar factors."""
    factors = list(deltas.factors().values())
    return tsv_merge(factors) if factors else deltas.zeros()


def tsv_c(deltas: Deltas) -> dict[str, Tensor]:
    """The factors of each task's delta, which stand for it: `task.u`, `task.s`, `task.v`."""
    return {
        f"{task}.{part}": tensor
        for task, factors in deltas.factors().items()
        for part, tensor in factors._asdict().items()
    }


def restored(part: dict[str, Tensor], task: str) -> Tensor | None:
    """What a task's delta becomes; none where the task changes nothing."""
    if f"{task}.s" not in part:
        return None
    return Factors(*(part[f"{task}.{name}"].float() for name in "usv")).dense()
