"""Static merges: all tasks of one tensor to one delta, or to a compressed form of each. One file and one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from massmerge.merging.static.average import average
from massmerge.merging.static.consensus import consensus
from massmerge.merging.static.dare import dare
from massmerge.merging.static.deltas import Deltas
from massmerge.merging.static.emr import ROUNDS as EMR_ROUNDS
from massmerge.merging.static.emr import emr
from massmerge.merging.static.emr import restored as restored_emr
from massmerge.merging.static.isotropic import iso_c, iso_cts
from massmerge.merging.static.rounds import Known, Round
from massmerge.merging.static.task_arithmetic import task_arithmetic
from massmerge.merging.static.ties import ROUNDS as TIES_ROUNDS
from massmerge.merging.static.ties import ties
from massmerge.merging.static.tsv import restored as restored_tsv
from massmerge.merging.static.tsv import tsv_c, tsv_m

__all__ = ["KEEPING_METHODS", "STATIC_METHODS", "Deltas", "KeepingMethod", "Known", "Round", "StaticMethod", "average"]


@dataclass(frozen=True)
class StaticMethod:
    """A method that makes one delta of all tasks'; the caller scales it."""

    merge: Callable[[Deltas, Known], Tensor]
    rounds: tuple[Round, ...] = ()
    """Looks at all tensors that come first."""
    matrices: bool = False
    """Whether it is of matrices only; other tensors are averaged then, and not scaled."""
    elementwise: bool = False
    """Whether each number goes its own way, looks included, so that a tensor can be taken a span at a time."""


@dataclass(frozen=True)
class KeepingMethod:
    """A method that keeps the tasks apart: a compressed form of all of them, and what it becomes for each."""

    compress: Callable[[Deltas, Known], dict[str, Tensor]]
    restored: Callable[[dict[str, Tensor], str], Tensor | None]
    rounds: tuple[Round, ...] = ()
    matrices: bool = False
    """Whether it is of matrices only; other tensors are kept as the experts have them."""


STATIC_METHODS: dict[str, StaticMethod] = {
    "average": StaticMethod(lambda deltas, known: average(deltas), elementwise=True),
    "task_arithmetic": StaticMethod(lambda deltas, known: task_arithmetic(deltas), elementwise=True),
    "ties": StaticMethod(
        lambda deltas, known: ties(
            deltas,
            thresholds=known.found["thresholds"],
            majority=known.found["majority"],
            combine=known.options["combine"],
        ),
        TIES_ROUNDS,
        elementwise=True,
    ),
    "dare": StaticMethod(
        lambda deltas, known: dare(deltas, drop=known.options["drop"], seed=known.options["seed"]),
    ),
    "consensus": StaticMethod(
        lambda deltas, known: consensus(deltas, threshold=known.options["threshold"], least=known.options["least"]),
        elementwise=True,
    ),
    "tsv_m": StaticMethod(lambda deltas, known: tsv_m(deltas), matrices=True),
    "iso_c": StaticMethod(lambda deltas, known: iso_c(deltas), matrices=True),
    "iso_cts": StaticMethod(lambda deltas, known: iso_cts(deltas, common=known.options["common"]), matrices=True),
}
KEEPING_METHODS: dict[str, KeepingMethod] = {
    "tsv_c": KeepingMethod(lambda deltas, known: tsv_c(deltas), restored_tsv, matrices=True),
    "emr": KeepingMethod(lambda deltas, known: emr(deltas, scales=known.found["scales"]), restored_emr, EMR_ROUNDS),
}
