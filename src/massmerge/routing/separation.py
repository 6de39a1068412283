"""Whether the tasks' subspaces can tell inputs apart at all, seen from the subspaces alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ALIKE = 0.5
_RANDOM = 1.5
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Separation:
    """How the tasks' subspaces lie to each other, the mean over sites.

    Attributes:
        overlap: share of the smaller subspace that lies in the other one (T, T); 1 if it lies in it wholly.
        chance: what the overlap of random subspaces of their sizes would be (T, T).
    """

    overlap: Tensor
    chance: Tensor

    def alike(self, first: int, second: int) -> bool:
        """Whether two tasks share so much that residuals hardly differ. Full fine-tunes of one base share 0.2 to 0.3."""
        return bool(self.overlap[first, second] > _ALIKE)

    def random(self, task: int) -> bool:
        """Whether a task shares no more with any other than random subspaces do.

        What inputs of one backbone have in common is in every subspace that was learned from inputs, so those of full
        fine-tunes share three to four times as much. Directions that training has not moved share nothing.
        """
        others = [i for i in range(len(self.overlap)) if i != task]
        return bool((self.overlap[task, others] < _RANDOM * self.chance[task, others]).all())


def without_common(bases: list[Tensor]) -> list[Tensor]:
    """The tasks' rows at a site without the directions that half of the tasks share, where the tasks are alike.

    LoRA adapters that were trained from one random start change almost the same directions; all residuals are then equal
    but for what little was moved, and that is what remains here. Subspaces that are not alike are left as they are.

    Args:
        bases: for each task orthonormal rows `v (k, d)`.
    """
    count = len(bases)
    if count < 2 or not any(len(v) for v in bases):
        return bases
    pairs = separation([bases]).overlap[~torch.eye(count, dtype=torch.bool)]
    if pairs.mean() <= _ALIKE:
        return bases
    _, s, directions = torch.linalg.svd(torch.cat(bases), full_matrices=False)
    common = directions[s.square() > count / 2]  # the squares add up to one for each task that has a direction
    return [_rest(v, common) for v in bases]


def _rest(v: Tensor, common: Tensor) -> Tensor:
    """Orthonormal rows that span what is left of `v`'s outside of `common`."""
    _, s, rows = torch.linalg.svd(v - (v @ common.mT) @ common, full_matrices=False)
    return rows[s > _ROUNDING]


def separation(sites: list[list[Tensor]]) -> Separation:
    """How subspaces lie to each other.

    Args:
        sites: for each site the tasks' orthonormal rows `v (k, d)`; k is 0 for a task that changes nothing there.
    """
    pairs = [[_pair(a, b) for a in site for b in site] for site in sites]
    found = torch.tensor(pairs).mean(0).reshape(len(sites[0]), len(sites[0]), 2)
    return Separation(found[..., 0], found[..., 1])


def _pair(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Overlap of two subspaces, and by chance."""
    small, large = sorted((first.shape[0], second.shape[0]))
    if not small:
        return 0.0, 0.0
    return float((first @ second.mT).square().sum()) / small, large / first.shape[1]
