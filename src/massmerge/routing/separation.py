"""Whether the tasks' subspaces can tell inputs apart at all, seen from the subspaces alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from massmerge.linalg.task_sums import task_sums

_PROBES = 32
_ALIKE = 0.5
_BY_CHANCE = 1.25  # subspaces of half of the width share half by chance; what they share must be more than that
_SAME = 0.999  # cosine of all deltas; adapters of one start share their directions, not what they do with them
_KIN = 1.5
_RANDOM = 1.5
_ROUNDING = 1e-4
_ROWS = 256  # of all subspaces, in one product, which then stays in the processor's cache


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

    def kin(self, targets: Sequence[int] | None = None, times: float = _KIN) -> Tensor:
        """Which tasks share more than so many times the median of all pairs (T, T).

        Their inputs look alike, as drawings of animals and drawings of furniture do, and early blocks see little else.

        Args:
            targets: for each task the first one with the same expert: between those there is nothing to be told.
            times: how many.
        """
        targets = targets or range(len(self.overlap))
        same = torch.tensor(targets)
        others = same[:, None] != same
        if len(set(targets)) < 3:
            return torch.zeros_like(others)  # one pair has nothing to be compared with
        return (self.overlap > times * self.overlap[others].median()) & others


def random_adapters(found: Separation, forms: Sequence[str]) -> list[int]:
    """Positions of the adapters whose subspaces look random, as those of adapters with random starts of their own do.

    None where several full fine-tunes look random too, as in examples and tests: nothing there was learned from inputs.

    Args:
        found: how the tasks' subspaces lie.
        forms: `full` or `adapter`, of each task.
    """
    full = [i for i, form in enumerate(forms) if form == "full"]
    if len(full) > 1 and all(found.random(i) for i in full):
        return []
    return [i for i, form in enumerate(forms) if form == "adapter" and found.random(i)]


def own_starts(found: Separation, forms: Sequence[str]) -> list[int]:
    """Positions of the adapters that are like no other: those of one random start share most of their directions.

    Args:
        found: how the tasks' subspaces lie.
        forms: `full` or `adapter`, of each task.
    """
    adapters = [i for i, form in enumerate(forms) if form == "adapter"]
    return [i for i in adapters if not any(found.alike(i, j) for j in adapters if j != i)]


def delta_cosines(cosine: Tensor, norm: Tensor, energy: Tensor) -> Tensor:
    """Cosines (T, T) of the tasks' factored deltas, all matrices together.

    Args:
        cosine: of each matrix, between the tasks' factors (matrices, T, T).
        norm: length of each delta (matrices, T).
        energy: share of its square that the factors hold (matrices, T).
    """
    if not len(norm):
        return torch.zeros(norm.shape[1], norm.shape[1], dtype=torch.float64)
    kept = norm.double() * energy.double().sqrt()
    inner = torch.zeros(norm.shape[1], norm.shape[1], dtype=torch.float64)
    for matrix, scale in zip(cosine, kept, strict=True):  # all at once in float64 is gigabytes of a thousand tasks
        inner += matrix * scale[:, None] * scale[None, :]
    length = kept.square().sum(0).sqrt()
    product = length[:, None] * length[None, :]
    return torch.where(product > 0, inner / product.clamp_min(1e-300), 0.0)


def routing_targets(similarity: Tensor) -> list[int]:
    """For each task the first task with the same expert, which stands for all of them.

    Args:
        similarity: cosines of the tasks' deltas (T, T), as `delta_cosines` gives them.
    """
    same = (similarity > _SAME).triu(1)
    first = torch.where(same.any(0), same.int().argmax(0), torch.arange(len(same)))  # of equals the first
    found: list[int] = first.tolist()
    return found


def without_common(bases: list[Tensor]) -> list[Tensor]:
    """The tasks' rows at a site without the directions that half of the tasks share, where the tasks are alike.

    LoRA adapters that were trained from one random start change almost the same directions; all residuals are then equal
    but for what little was moved, and that is what remains here. Subspaces that are not alike are left as they are.

    Args:
        bases: for each task orthonormal rows `v (k, d)`; tasks of one expert are given once, or all they have is common.
    """
    count = len(bases)
    if count < 2 or not any(len(v) for v in bases) or clearly_apart(bases):
        return bases
    found, pairs = separation([bases]), ~torch.eye(count, dtype=torch.bool)
    if found.overlap[pairs].mean() <= max(_ALIKE, _BY_CHANCE * float(found.chance[pairs].mean())):
        return bases
    return without_shared(bases)


def without_shared(bases: list[Tensor]) -> list[Tensor]:
    """The tasks' rows at a site without the directions that half of the tasks share, whether the tasks are alike or not.

    Args:
        bases: as in `without_common`.
    """
    _, s, directions = torch.linalg.svd(torch.cat(bases), full_matrices=False)
    common = directions[s.square() > len(bases) / 2]  # the squares add up to one for each task that has a direction
    return [_rest(v, common) for v in bases]


def clearly_apart(bases: list[Tensor]) -> bool:
    """Whether the tasks' rows are so far from alike that a look with a few random vectors shows it.

    The squared overlaps of all pairs, and the ranks, add up to the squared length of the sum of all projections, which
    random vectors estimate to a few per cent. Every product of two tasks would cost much more while a bundle is loaded.

    Args:
        bases: as in `without_common`.
    """
    ranks = [len(v) for v in bases]
    stacked = torch.cat(bases)
    probes = torch.randn(stacked.shape[1], _PROBES, generator=torch.Generator().manual_seed(0)).to(stacked)
    together = float((stacked.mT @ (stacked @ probes)).square().sum()) / _PROBES
    pairs = (
        len(bases) * (len(bases) - 1) * min(rank for rank in ranks if rank)
    )  # the least rank makes it an upper bound
    return (together - sum(ranks)) / pairs < 0.8 * _ALIKE


def _rest(v: Tensor, common: Tensor) -> Tensor:
    """Orthonormal rows that span what is left of `v`'s outside of `common`."""
    _, s, rows = torch.linalg.svd(v - (v @ common.mT) @ common, full_matrices=False)
    return rows[s > _ROUNDING]


def separation(sites: list[list[Tensor]]) -> Separation:
    """How subspaces lie to each other.

    Args:
        sites: for each site the tasks' orthonormal rows `v (k, d)`; k is 0 for a task that changes nothing there.
    """
    return mean_separation([Separation(*_pairs(site)) for site in sites])


def mean_separation(sites: Sequence[Separation]) -> Separation:
    """How subspaces lie to each other, by what was found at each site."""
    overlap, chance = (torch.stack([getattr(site, name) for site in sites]).mean(0) for name in ("overlap", "chance"))
    return Separation(overlap, chance)


def _pairs(bases: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Overlap of every two subspaces at a site, and by chance (T, T), by products of many tasks with all others."""
    own = [len(v) for v in bases]
    ranks, stacked = torch.tensor(own), torch.cat(bases)
    shared = stacked.new_zeros(len(bases), len(bases))
    step = max(1, _ROWS // max(1, *own))
    for start in range(0, len(bases), step):
        stop, done = start + step, sum(own[:start])
        rows = stacked[done : done + sum(own[start:stop])]
        products = (rows @ stacked[done:].mT).square_()
        shared[start:stop, start:] = task_sums(task_sums(products, own[start:]).mT, own[start:stop]).mT
    shared = shared.triu() + shared.triu(1).mT
    small, large = torch.minimum(ranks[:, None], ranks), torch.maximum(ranks[:, None], ranks)
    return shared / small.clamp_min(1), (large / stacked.shape[1]).where(small > 0, 0.0)
