"""Whether confidences mean what they say: calibration error, and accuracy of the surest answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 10
COVERAGES = (0.5, 0.7, 0.9, 1.0)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bin:
    """Answers of similar confidence."""

    low: float
    high: float
    rows: int
    share: float
    """Of all answers, tasks counting alike."""
    confidence: float
    """Their mean confidence."""
    accuracy: float
    """The share of them that is right."""


@dataclass(frozen=True)
class Reliability:
    """How confidences and correctness of answers go together; each task counts alike, however many rows it has."""

    rows: int
    """Answers that have a confidence."""
    calibration_error: float
    """Mean difference between confidence and accuracy over the bins (expected calibration error)."""
    bins: tuple[Bin, ...]
    accuracy_at: dict[str, float]
    """Accuracy of the surest 50, 70, 90 and 100 % of the answers."""
    normalised_at: dict[str, float] | None
    """The same, divided by the mean accuracy of the experts."""
    curve: tuple[tuple[float, float], ...]
    """Coverage and accuracy, from the surest answers to all of them, for the plot."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def reliability(
    confidences: Sequence[float], right: Sequence[int], tasks: Sequence[str | int], reference: float | None = None
) -> Reliability:
    """How confidences and correctness of answers go together.

    Args:
        confidences: of each answer.
        right: whether it was right.
        tasks: the true task of each, by name or number.
        reference: mean accuracy of the experts on the same rows.
    """
    sure, hits = np.asarray(confidences, dtype=float), np.asarray(right, dtype=float)
    _, own, counts = np.unique(np.asarray(tasks), return_inverse=True, return_counts=True)
    weights = 1 / (len(counts) * counts[own])
    bins = _bins(sure, hits, weights)
    coverage, accuracy = coverage_curve(sure, hits, weights)
    at = {f"{share:.0%}": float(np.interp(share, coverage, accuracy)) for share in COVERAGES}
    places = np.linspace(0.05, 1.0, 96)
    return Reliability(
        len(sure),
        calibration_error(sure, hits, weights),
        bins,
        at,
        {name: value / reference for name, value in at.items()} if reference else None,
        tuple(zip(places.round(4).tolist(), np.interp(places, coverage, accuracy).tolist(), strict=True)),
    )


def calibration_error(sure: Floats, hits: Floats, weights: Floats) -> float:
    """The mean over bins of |accuracy − confidence|, each bin counting by the weight (n,) of its answers."""
    return float(sum(one.share * abs(one.accuracy - one.confidence) for one in _bins(sure, hits, weights)))


def _bins(sure: Floats, hits: Floats, weights: Floats) -> tuple[Bin, ...]:
    """Bins of equal width that hold any answers."""
    places = np.minimum((sure * BINS).astype(int), BINS - 1)
    found = []
    for place in range(BINS):
        own = places == place
        if not own.any():
            continue
        weight = float(weights[own].sum())
        found.append(
            Bin(
                place / BINS,
                (place + 1) / BINS,
                int(own.sum()),
                weight / float(weights.sum()),
                float(sure[own] @ weights[own]) / weight,
                float(hits[own] @ weights[own]) / weight,
            )
        )
    return tuple(found)


def coverage_curve(sure: Floats, hits: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Coverage and accuracy (n,) of the surest answers, one more at each step."""
    order = np.argsort(-sure, kind="stable")
    given = np.cumsum(weights[order])
    return given / given[-1], np.cumsum((hits * weights)[order]) / given


def auroc(known: Floats, foreign: Floats) -> float:
    """The probability that a known input scores higher than a foreign one, ties counting half."""
    everything = np.concatenate([known, foreign])
    _, places, counts = np.unique(everything, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return float((ranks[: len(known)].sum() - len(known) * (len(known) + 1) / 2) / (len(known) * len(foreign)))
