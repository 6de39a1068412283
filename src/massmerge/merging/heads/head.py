"""A task's head as a merge finds it, before it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from massmerge.checkpoints import HeadParts
from massmerge.errors import InputError
from massmerge.merging.heads.labels import repeated
from massmerge.recipe import ProblemType


@dataclass(frozen=True)
class HeadSource:
    """A task's head and its label names, found but not yet written."""

    kind: Literal["shell", "linear", "none"]
    class_name: str | None
    labels: tuple[str, ...] | None
    nbytes: int
    problem_type: ProblemType | None = None
    """What its outputs mean; none without labels, and where a bundle keeps the head."""
    parts: HeadParts | None = None
    make: Callable[[], dict[str, Tensor]] | None = None
    """Reads or computes the tensors of a head of linear layers, when it is written."""
    options: dict[str, Any] = field(default_factory=dict)
    """How such a head computes."""
    features: Callable[[], str] | None = None
    """Finds what a linear head reads, when it is written; as the recipe says without it."""
    folder: Path | None = None
    """Where a bundle keeps it already."""


def refuse_label_count(labels: tuple[str, ...], size: int) -> None:
    """Refuse labels that are not one for each output of a head, or two of one name."""
    if len(labels) != size:
        raise InputError(
            f"has {len(labels)} labels, but its head has {size} outputs. Give one label for each output, in order."
        )
    if twice := repeated(labels):
        raise InputError(f"has the labels {twice} more than once. Give each output its own name.")
