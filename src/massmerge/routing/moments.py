"""What is kept of calibration inputs, so that a router can be fitted again when tasks come and go: means and scatter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

_DIRECTIONS = 64  # of the scatter that are kept; 256 route no better on validation rows


def fit_moments(seen: Sequence[Tensor], owners: Tensor, tasks: int) -> dict[str, Tensor]:
    """Each task's mean and number of inputs, and how inputs of one task differ, the same for all tasks.

    Args:
        seen: what each voter sees of the inputs (n, width); normalised to length 1 here. Voters are taken together, D wide.
        owners: task of each input (n,).
        tasks: number of tasks, each with at least one input.

    Returns:
        `means (T, D)`, `counts (T,)`, `directions (r, D)`, which are scaled by their spreads, and `rest (D,)`, the spread
        that is in none of them; half precision.
    """
    units = torch.cat([normalize(z.float(), dim=1) for z in seen], 1)
    means = torch.stack([units[owners == task].mean(0) for task in range(tasks)])
    scatter = (units - means[owners]) / max(1, len(units)) ** 0.5
    _, s, rows = torch.linalg.svd(scatter, full_matrices=False)
    directions = s[:_DIRECTIONS, None] * rows[:_DIRECTIONS]
    rest = (scatter.square().sum(0) - directions.square().sum(0)).clamp_min(0).sqrt()
    counts = torch.bincount(owners, minlength=tasks)
    return {"means": means.half(), "counts": counts, "directions": directions.half().contiguous(), "rest": rest.half()}


def replay(kept: Mapping[str, Tensor], task: int, widths: Sequence[int], most: int) -> list[Tensor]:
    """Activations like those that a task's inputs had: what each voter would see (n, width). The same at every call.

    Args:
        kept: as `fit_moments` keeps it.
        task: which task; its mean is kept as it is.
        widths: of each voter.
        most: how many inputs at most.
    """
    count, random = min(most, int(kept["counts"][task])), torch.Generator().manual_seed(task)
    directions, rest = kept["directions"].float(), kept["rest"].float()
    noise = torch.randn(count, len(directions), generator=random) @ directions
    noise += torch.randn(count, len(rest), generator=random) * rest
    return list(torch.split(kept["means"][task].float() + noise - noise.mean(0), list(widths), dim=1))


def of_tasks(kept: Mapping[str, Tensor], tasks: Sequence[int]) -> dict[str, Tensor]:
    """What is kept of some of the tasks."""
    return {**kept, **{name: kept[name][list(tasks)] for name in ("means", "counts")}}
