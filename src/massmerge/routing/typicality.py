"""Whether an input belongs to any task at all: how far it is from the inputs that a calibration has seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from massmerge.linalg.factors import truncated_svd
from massmerge.routing.depth import deeper, mean_lift
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.selection import standardize

_SHRINKAGE = (
    0.3  # of the scatter's covariance towards a multiple of the identity; anything from 0.1 to 0.8 does as well
)
_DIRECTIONS = 64  # of the scatter that are kept; the others count alike
_FOLDS = 4
_FLAT = 1e-6
_USUAL = "shortfalls"  # another name than that of the versions that counted evidence differently
_SHARPNESS = 2.0  # of the corner between usual and too little
_MOST_SHAPE = 1e4  # inputs that hardly differ
_LEAST_SPREAD = 0.02  # of an evidence's size: clear inputs differ less, and a call that allows fewer tasks differs more


def fit_space(z: Tensor, owners: Tensor, tasks: int) -> dict[str, Tensor]:
    """What one voter keeps of inputs of known task: the tasks' means, and the directions in which inputs of a task differ.

    Args:
        z: activations (n, d); normalised to length 1 here.
        owners: task of each (n,).
        tasks: number of tasks, each with at least one activation.

    Returns:
        `means (T, d)`, `directions (r, d)`, `weights (r)` and `floor (1)`, so that the squared distance of `z` to a mean
        `p` is `floor · ‖z − p‖² + Σ weights · (directions · (z − p))²`.
    """
    units = normalize(z.float(), dim=1)
    means = torch.stack([units[owners == t].mean(0) for t in range(tasks)])
    scatter = (units - means[owners]) / math.sqrt(max(1, len(units) - tasks))
    _, s, directions = truncated_svd(scatter, min(max(1, _DIRECTIONS), *scatter.shape))
    kept, total = min(_DIRECTIONS, int((s > _FLAT).sum())), float(scatter.square().sum())
    variance = total / units.shape[1] or 1.0
    rest = max(0.0, total - float(s[:kept].square().sum())) / max(1, units.shape[1] - kept)
    floor = 1 / (_SHRINKAGE * variance + (1 - _SHRINKAGE) * rest)
    weights = 1 / (_SHRINKAGE * variance + (1 - _SHRINKAGE) * s[:kept].square()) - floor
    return {
        "means": means,
        "directions": directions[:kept].contiguous(),
        "weights": weights.contiguous(),
        "floor": torch.tensor([floor]),
    }


def log_distances(z: Tensor, space: Mapping[str, Tensor]) -> Tensor:
    """The logarithm of the squared distance of activations (n, d) to each task's mean (n, T), as `fit_space` defines it."""
    units, means = normalize(z.float(), dim=1), space["means"]
    plain = torch.cdist(units, means, compute_mode="donot_use_mm_for_euclid_dist").square()
    along = (units @ space["directions"].mT)[:, None] - means @ space["directions"].mT
    return (space["floor"] * plain + (along.square() * space["weights"]).sum(2)).clamp_min(1e-12).log()


def nearness(distances: Tensor) -> Tensor:
    """How near inputs are to their nearest task, and how much nearer than to the others (n, 2).

    Args:
        distances: logarithms (n, T), the mean over voters.
    """
    own, count = distances.amin(1), distances.shape[1]
    others = (distances.sum(1) - own) / max(1, count - 1)
    return torch.stack([-own, others - own if count > 1 else torch.zeros_like(own)], 1)


def standing(
    seen: Sequence[Tensor], subspaces: Sequence[ProjectionRouter], voters: Sequence[str], tasks: Sequence[int]
) -> Tensor:
    """How far subspaces agree on the best task, as `agreements` has it, and how much of the input it holds (n, 2).

    Args:
        seen: what each voter sees (n, d).
        subspaces: the tasks' for each voter.
        voters: their names.
        tasks: positions of the tasks that are in question.
    """
    units = [normalize(z.float(), dim=1) for z in seen]
    scores = [own(z) for own, z in zip(subspaces, units, strict=True)]
    vote = standardize(torch.stack(scores)[:, :, list(tasks)]).mean(0)
    held = mean_lift([own.lift(z, s) for own, z, s in zip(subspaces, units, scores, strict=True)], voters)
    greatest = max(1, len(tasks) - 1) / len(tasks) ** 0.5
    best = held[:, list(tasks)].gather(1, vote.argmin(1, keepdim=True))[:, 0]
    return torch.stack([-vote.amin(1) / greatest, best.clamp_min(_FLAT).log()], 1)


def fit_typicality(
    voters: Sequence[str], seen: Sequence[Tensor], owners: Tensor, tasks: int, subspaces: Sequence[ProjectionRouter]
) -> tuple[dict[str, Tensor], Tensor]:
    """What is kept of inputs of known task: a space for each voter, and how near inputs usually are that were left out.

    Args:
        voters: their names.
        seen: what each voter sees of the inputs (n, d).
        owners: task of each (n,).
        tasks: number of tasks.
        subspaces: the tasks' for each voter.

    Returns:
        What is kept, means and directions in half precision; and how typical each input was found when it was left out
        (n,), none where a task has but one.
    """
    deep = deeper(voters)
    rows, near = _left_out([seen[i] for i in deep], owners, tasks)
    evidence = torch.cat([near, standing([z[rows] for z in seen], subspaces, voters, range(tasks))], 1)
    usual = _usual(evidence if len(rows) else torch.zeros(1, 4))
    halved = ("means", "directions")
    found = {
        f"{voters[i]}.{name}": tensor.half() if name in halved else tensor
        for i in deep
        for name, tensor in fit_space(seen[i], owners, tasks).items()
    }
    return {**found, _USUAL: usual}, _typical(evidence, usual)


def _left_out(seen: Sequence[Tensor], owners: Tensor, tasks: int) -> tuple[Tensor, Tensor]:
    """Places of inputs, and their nearness (n, 2) to what is fitted without them."""
    fold = torch.zeros(len(owners), dtype=torch.long)
    for task in range(tasks):
        own = torch.where(owners == task)[0]
        fold[own] = torch.arange(len(own)) % _FOLDS
    rows, found = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, 2)]
    for number in range(_FOLDS):
        out, kept = torch.where(fold == number)[0], fold != number
        if not len(out) or len(set(owners[kept].tolist())) < tasks:
            continue  # a task with one input has none to be left out
        spaces = [fit_space(z[kept], owners[kept], tasks) for z in seen]
        distances = [log_distances(z[out], space) for z, space in zip(seen, spaces, strict=True)]
        rows.append(out)
        found.append(nearness(torch.stack(distances).mean(0)))
    return torch.cat(rows), torch.cat(found)


def _usual(evidence: Tensor) -> Tensor:
    """Mean and spread of each evidence (n, 4), and of what is short of it altogether: (5, 2)."""
    mean = evidence.mean(0)
    least = (_LEAST_SPREAD * mean.abs()).clamp_min(_FLAT)
    parts = torch.stack([mean, torch.maximum(evidence.std(0, correction=0), least)], 1)
    short = _shortfall(evidence, parts)
    return torch.cat([parts, torch.stack([short.mean(), short.std(correction=0).clamp_min(_FLAT)])[None]])


def _shortfall(evidence: Tensor, usual: Tensor) -> Tensor:
    """How far evidence falls short of the usual (n,). More than usual of one does not make up for too little of another."""
    return softplus(-(evidence - usual[:4, 0]) / usual[:4, 1], beta=_SHARPNESS).sum(1)


def _typical(evidence: Tensor, usual: Tensor) -> Tensor:
    """About which share of inputs falls shorter (n,), by a gamma distribution of the same mean and spread."""
    evidence, usual = (
        evidence.cpu().double(),
        usual.cpu().double(),
    )  # not every device has this function, or double precision
    mean, spread = usual[4]
    short = _shortfall(evidence, usual)
    shape = (mean / spread).square().clamp(max=_MOST_SHAPE)
    return torch.special.gammaincc(shape.expand_as(short), short * shape / mean).float()


@dataclass(frozen=True)
class Typicality:
    """How typical inputs are of the tasks that a calibration has seen inputs of.

    Attributes:
        voters: their names.
        spaces: of each of the deeper ones.
        usual: as `fit_typicality` keeps it.
        subspaces: the tasks' for each voter.
    """

    voters: Sequence[str]
    spaces: list[dict[str, Tensor]]
    usual: Tensor
    subspaces: Sequence[ProjectionRouter]

    @classmethod
    def load(
        cls, voters: Sequence[str], kept: Mapping[str, Tensor], subspaces: Sequence[ProjectionRouter]
    ) -> Typicality | None:
        """From what `fit_typicality` has kept; none if that is not there for every voter."""
        names, deep = ("means", "directions", "weights", "floor"), [voters[i] for i in deeper(voters)]
        if _USUAL not in kept or any(f"{voter}.{name}" not in kept for voter in deep for name in names):
            return None
        spaces = [{name: kept[f"{voter}.{name}"].float() for name in names} for voter in deep]
        return cls(voters, spaces, kept[_USUAL], subspaces)

    @torch.inference_mode()
    def __call__(self, seen: Sequence[Tensor], tasks: Sequence[int]) -> Tensor:
        """About which share of the tasks' own inputs is less typical than each input (n,).

        Args:
            seen: what each voter sees (n, d).
            tasks: positions of the tasks that are in question.
        """
        deep = [seen[i] for i in deeper(self.voters)]
        distances = [log_distances(z, space)[:, list(tasks)] for z, space in zip(deep, self.spaces, strict=True)]
        near = nearness(torch.stack(distances).mean(0))
        return _typical(torch.cat([near, standing(seen, self.subspaces, self.voters, tasks)], 1), self.usual)
