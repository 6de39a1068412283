"""Shares of a sample with the interval in which the true share lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_Z95 = 1.959963984540054


class Figure(NamedTuple):
    """A figure with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(right: int, count: int) -> Figure:
    """A share with Wilson's 95 % interval, which holds for shares near 0 and 1 too."""
    share, z2 = right / count, _Z95**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return Figure(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def mean_of(figures: Sequence[Figure]) -> Figure:
    """The mean of independent figures; the distances to the ends of their intervals add up as errors do."""
    count = len(figures)
    value = sum(figure.value for figure in figures) / count
    low = math.sqrt(sum((figure.value - figure.low) ** 2 for figure in figures)) / count
    high = math.sqrt(sum((figure.high - figure.value) ** 2 for figure in figures)) / count
    return Figure(value, max(0.0, value - low), min(1.0, value + high))
