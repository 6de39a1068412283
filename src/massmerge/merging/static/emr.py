"""EMR (Huang et al., 2024): elect, mask, rescale. One unified delta, and for each task a mask of one bit a weight."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from massmerge.merging.static.deltas import Deltas
from massmerge.merging.static.rounds import Known, Round


def unify(deltas: Deltas) -> Tensor:
    """In each entry the sign of the sum, and the largest magnitude among the tasks of that sign."""
    positive = deltas.sum() > 0  # a sum of zero elects the negative sign
    largest = deltas.zeros()
    for _, delta in deltas:
        largest = torch.maximum(largest, torch.where(positive, delta, -delta))
    return torch.where(positive, largest, -largest)


def agrees(delta: Tensor, unified: Tensor) -> Tensor:
    """The task's mask: entries whose sign is the unified one."""
    return delta * unified.sign() > 0


def mean_sizes(deltas: Deltas, known: Known) -> Tensor:
    """Of one tensor, for each task, the mean magnitude of its delta and of what its mask leaves of the unified (T, 2)."""
    unified = unify(deltas)
    sizes = torch.zeros(len(known.tasks), 2, dtype=torch.float64)
    for task, delta in deltas:
        both = torch.stack([delta, unified * agrees(delta, unified)]).flatten(1)
        sizes[known.tasks.index(task)] = both.abs().mean(1, dtype=torch.float64).cpu()
    return sizes


def find_scales(sizes: Tensor, known: Known) -> dict[str, dict[str, float]]:
    """Each task's scale, from the sizes of all tensors together; 1 for a task that changes nothing."""
    scales = torch.where(sizes[:, 1] > 0, sizes[:, 0] / sizes[:, 1].clamp_min(1e-300), 1.0)
    return {"scales": dict(zip(known.tasks, scales.tolist(), strict=True))}


ROUNDS = (Round(mean_sizes, find_scales),)


def emr(deltas: Deltas, *, scales: dict[str, float]) -> dict[str, Tensor]:
    """The unified delta, and each task's scale and mask, packed to bits: `unified`, `task.scale`, `task.mask`."""
    unified = unify(deltas)
    part = {"unified": unified}
    for task, delta in deltas:
        part |= {f"{task}.scale": torch.tensor(scales[task]), f"{task}.mask": _pack(agrees(delta, unified))}
    return part


def restored(part: dict[str, Tensor], task: str) -> Tensor | None:
    """What a task's delta becomes; none where the task changes nothing."""
    if f"{task}.mask" not in part:
        return None
    unified = part["unified"].float()
    mask = np.unpackbits(part[f"{task}.mask"].numpy(), count=math.prod(unified.shape))
    return part[f"{task}.scale"] * unified * torch.from_numpy(mask).reshape(unified.shape)


def _pack(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1)))
