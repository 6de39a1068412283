"""TIES (Yadav et al., 2023): trim each delta to its largest entries, elect a sign, merge the entries that agree.

Two things are known only of all tensors together: the magnitude at which a task's delta is trimmed, and the sign that
most entries elect, which those take whose sum is zero. The first is found exactly by two histograms over all tensors:
magnitudes of float32 are in the order of their 31 bits, so the upper 16 bits find the bin and the lower 15 the value.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from massmerge.merging.static.deltas import Deltas
from massmerge.merging.static.rounds import Known, Round

_LOW_BITS = 15
_COARSE, _FINE = 1 << (31 - _LOW_BITS), 1 << _LOW_BITS
_PIECE = 1 << 18


def coarse_histogram(deltas: Deltas, known: Known) -> Tensor:
    """How many of each task's magnitudes lie in each bin (T, bins), by their upper bits. Zeros are not counted."""
    counts = torch.zeros(len(known.tasks), _COARSE, dtype=torch.int64)
    for task, delta in deltas:
        row = counts[known.tasks.index(task)]
        for bits in _bits(delta):
            row += torch.bincount(bits[bits > 0] >> _LOW_BITS, minlength=_COARSE).cpu()
    return counts


def find_bins(counts: Tensor, known: Known) -> dict[str, Tensor]:
    """The bin (T,) of each task's last entry that is kept, and its place (T,) from the top of that bin; 0 if all are."""
    wanted = max(1, int(known.options["keep"] * known.entries))
    above = counts.flip(1).cumsum(1)  # the largest bin first
    reached = above >= wanted
    position = reached.int().argmax(1, keepdim=True)
    places = wanted - (above - counts.flip(1)).gather(1, position)[:, 0]
    found = reached.any(1)
    bins = torch.where(found, _COARSE - 1 - position[:, 0], 0)
    return {"bins": bins, "places": torch.where(found, places, 0)}


def fine_histogram(deltas: Deltas, known: Known) -> Tensor:
    """How many of each task's magnitudes within its bin have each value of the lower bits (T, values)."""
    counts = torch.zeros(len(known.tasks), _FINE, dtype=torch.int64)
    for task, delta in deltas:
        row = known.tasks.index(task)
        for bits in _bits(delta):
            inside = bits[(bits >> _LOW_BITS == known.found["bins"][row]) & (bits > 0)]
            counts[row] += torch.bincount(inside & (_FINE - 1), minlength=_FINE).cpu()
    return counts


def find_thresholds(counts: Tensor, known: Known) -> dict[str, dict[str, float]]:
    """The magnitude of each task's last entry that is kept; 0 where all are."""
    bins, places = known.found["bins"], known.found["places"]
    low = _FINE - 1 - (counts.flip(1).cumsum(1) >= places[:, None]).int().argmax(1)
    bits = torch.where(places > 0, (bins << _LOW_BITS) + low, 0).to(torch.int32)
    return {"thresholds": dict(zip(known.tasks, bits.view(torch.float32).tolist(), strict=True))}


def sign_votes(deltas: Deltas, known: Known) -> Tensor:
    """Entries that elect + minus entries that elect -."""
    return _trimmed_sum(deltas, known.found["thresholds"]).sign().to(torch.int64).sum().cpu()


def find_majority(votes: Tensor, known: Known) -> dict[str, int]:
    """The sign that most entries elect."""
    return {"majority": int(votes.sign())}


ROUNDS = (
    Round(coarse_histogram, find_bins),
    Round(fine_histogram, find_thresholds),
    Round(sign_votes, find_majority),
)


def ties(deltas: Deltas, *, thresholds: dict[str, float], majority: int, combine: str) -> Tensor:
    """Entries of the trimmed deltas that agree with the elected sign, their mean or their sum."""
    sign = _trimmed_sum(deltas, thresholds).sign_()
    sign.masked_fill_(sign == 0, majority)
    total, agreeing = deltas.zeros(), deltas.zeros()
    for task, delta in deltas:
        for change, elected, added, count in _pieces(delta, sign, total, agreeing):
            agrees = (change * elected > 0) & (change.abs() >= thresholds[task])
            added += change * agrees
            count += agrees
    return total.div_(agreeing.clamp_min_(1)) if combine == "mean" else total


def _trimmed_sum(deltas: Deltas, thresholds: dict[str, float]) -> Tensor:
    total = deltas.zeros()
    for task, delta in deltas:
        for change, added in _pieces(delta, total):
            added += change * (change.abs() >= thresholds[task])
    return total


def _bits(delta: Tensor) -> Iterator[Tensor]:
    """Magnitudes as whole numbers of the same order."""
    return (piece.abs().view(torch.int32) for (piece,) in _pieces(delta))


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same entries of tensors of one shape, few enough that what is computed of them stays in a processor's cache."""
    return zip(*(torch.split(tensor.reshape(-1), _PIECE) for tensor in tensors), strict=True)
