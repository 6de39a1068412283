"""Sums over each task's own vectors, which lie side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def task_sums(values: Tensor, ranks: Sequence[int]) -> Tensor:
    """The sum of each task's values (…, T).

    Args:
        values: one for each vector of each task (…, R), task after task.
        ranks: how many vectors each task has; 0 gives a sum of 0.
    """
    held = [task for task, rank in enumerate(ranks) if rank]
    if len({ranks[task] for task in held}) == 1:
        sums = values.reshape(*values.shape[:-1], len(held), ranks[held[0]]).sum(-1)
        if len(held) == len(ranks):
            return sums
        every = values.new_zeros(*values.shape[:-1], len(ranks))
        every[..., held] = sums
        return every
    owners = torch.repeat_interleave(torch.tensor(ranks)).to(values.device)
    return values.new_zeros(*values.shape[:-1], len(ranks)).scatter_add(-1, owners.expand_as(values), values)
