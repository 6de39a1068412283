"""Whether a router gets better, told without names: by how well two halves of its voters agree on each input."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ERRORS = 2.0  # standard errors by which agreement must rise


def mutual_information(one: Tensor, other: Tensor, tasks: int) -> float:
    """What two decisions (n,) tell of each other, in nats. Two that say the same of every input tell nothing."""
    counts = torch.bincount(one * tasks + other, minlength=tasks * tasks).reshape(tasks, tasks).double()
    joint = counts / counts.sum()
    alone = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    there = joint > 0
    return float((joint[there] * (joint[there] / alone[there]).log()).sum())


def agreement(views: tuple[Tensor, Tensor]) -> float:
    """The share of inputs on which two decisions (n,) agree."""
    return float((views[0] == views[1]).double().mean())


def better(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], tasks: int) -> bool:
    """Whether two halves that see different things agree more than before, and more than they would by chance.

    Errors of halves that see different things differ, so they agree the more often, the more often both are right. They
    would also agree if both named one task for everything: then they would tell less of each other.

    Args:
        before: what each half decided (n,).
        after: what each decides now (n,).
        tasks: number of tasks.
    """
    then, now = before[0] == before[1], after[0] == after[1]
    gained, lost = int((now & ~then).sum()), int((then & ~now).sum())
    surely = gained - lost > _ERRORS * math.sqrt(gained + lost)
    return surely and mutual_information(*after, tasks) >= mutual_information(*before, tasks)
