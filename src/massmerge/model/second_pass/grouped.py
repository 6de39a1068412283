"""The updates of all segments of a batch by batched products.

On a CPU a loop over the segments is best: each segment's rows stay in the cache. On a GPU it is a loop of launches, for
every layer, so there the inputs are put into groups of one size, each of one segment, and a few kernels do all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from massmerge.model.speed import plain

if TYPE_CHECKING:
    from massmerge.model.second_pass.updates import LowRankChange


class Groups(NamedTuple):
    """The inputs of a batch in groups of one size; where a segment does not fill its last group, inputs are repeated."""

    size: int
    taken: Tensor
    """(groups · size,) for each place the input that stands there."""
    places: Tensor
    """(batch,) for each input its place."""
    owners: Tensor
    """(groups,) for each group its segment."""
    segments: Tensor
    """(batch,) for each input its segment."""


def grouped_here(device: torch.device, segments: int) -> bool:
    """Whether updates are computed in groups."""
    return segments > 1 and device.type != "cpu" and not plain()


def make_groups(bounds: Sequence[tuple[int, int]], device: torch.device) -> Groups:
    """Groups of segments that follow each other.

    A group is as large as the mean segment, so there are at most twice as many groups as segments.

    Args:
        bounds: first row of each segment, and the row behind its last.
        device: where the indices are needed.
    """
    batch = bounds[-1][1]
    size = -(-batch // len(bounds))
    taken: list[int] = []
    places: list[int] = []
    owners: list[int] = []
    for segment, (start, stop) in enumerate(bounds):
        places += range(len(taken), len(taken) + stop - start)
        count = -(-(stop - start) // size)
        taken += [*range(start, stop), *[start] * (count * size - (stop - start))]
        owners += [segment] * count
    members = [segment for segment, (start, stop) in enumerate(bounds) for _ in range(start, stop)]
    found = (torch.tensor(values, device=device) for values in (taken, places, owners, members))
    return Groups(size, *found)


def grouped_updates(x: Tensor, updates: Sequence[LowRankChange | None], groups: Groups) -> Tensor | None:
    """What the updates add (batch, …, m) to the outputs of inputs `x (batch, …, n)`; none where there is no update.

    Args:
        x: inputs of the layer.
        updates: of each segment.
        groups: of the batch.
    """
    real = [update for update in updates if update is not None]
    if not real:
        return None
    rank = max(len(update.core) for update in real)
    none = _Padded.nothing(real[0], rank)
    padded = [none if update is None else _Padded.of(update, rank) for update in updates]
    u, v = (torch.stack(parts)[groups.owners] for parts in ([p.u for p in padded], [p.v for p in padded]))
    rows = x[groups.taken].view(len(groups.owners), -1, x.shape[-1]).to(v.dtype)
    inner = torch.bmm(rows, v.mT)
    if all(p.core.ndim == 1 for p in padded):
        inner = inner * torch.stack([p.core for p in padded])[groups.owners][:, None]
    else:
        cores = [torch.diag(p.core) if p.core.ndim == 1 else p.core for p in padded]
        inner = torch.bmm(inner, torch.stack(cores)[groups.owners].mT)
    found = torch.bmm(inner, u.mT).view(-1, *x.shape[1:-1], u.shape[1])
    return found[groups.places].to(x.dtype)


class _Padded(NamedTuple):
    """An update whose rank is filled up with zeros: `u (m, R)`, `core (R,)` or `(R, R)`, `v (R, n)`."""

    u: Tensor
    core: Tensor
    v: Tensor

    @classmethod
    def of(cls, update: LowRankChange, rank: int) -> _Padded:
        """The factors of an update, padded to a rank."""
        u = update.us[0] if len(update.us) == 1 else torch.cat(update.us, 1)
        v = update.vs[0] if len(update.vs) == 1 else torch.cat(update.vs)
        missing = rank - len(v)
        if not missing:
            return cls(u, update.core, v)
        core = F.pad(update.core, (0, missing) if update.core.ndim == 1 else (0, missing, 0, missing))
        return cls(F.pad(u, (0, missing)), core, F.pad(v, (0, 0, 0, missing)))

    @classmethod
    def nothing(cls, like: LowRankChange, rank: int) -> _Padded:
        """For a segment that leaves the layer as it is."""
        u, v = like.us[0], like.vs[0]
        return cls(u.new_zeros(u.shape[0], rank), v.new_zeros(rank), v.new_zeros(rank, v.shape[1]))
