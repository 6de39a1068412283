"""The factor on a merged delta: what the papers use, and what is tried where there is data to choose it by."""

from __future__ import annotations

from typing import Any

# For 8, 14 and 20 tasks; other numbers take the nearest. The more deltas are added, the less of their sum is right.
_PUBLISHED = {
    "task_arithmetic": (0.3, 0.2, 0.1),
    "dare": (0.3, 0.2, 0.1),
    "consensus": (0.6, 0.4, 0.3),
    "iso_c": (1.0, 1.0, 0.9),
    "iso_cts": (1.0, 1.0, 0.9),
    "tsv_m": (1.0, 1.0, 1.0),
    "ties": (1.0, 1.0, 1.0),
}
_SUMS = ("task_arithmetic", "dare", "consensus")


def published_scale(method: str, tasks: int, options: dict[str, Any]) -> float:
    """The scale of a method's paper for so many tasks."""
    if options.get("combine") == "sum":
        return 0.3
    return _PUBLISHED[method][0 if tasks < 11 else 1 if tasks < 17 else 2]


def scale_of(method: str, tasks: int, options: dict[str, Any]) -> float:
    """The scale that a merge uses: the recipe's, the published one for `auto`, 1 for a method that has none."""
    scale = options.get("scale", 1.0)
    return published_scale(method, tasks, options) if scale == "auto" else float(scale)


def candidates(method: str, options: dict[str, Any]) -> list[float]:
    """The scales that are tried on validation data: to 1 for sums of deltas, to 3 for deltas of one delta's size."""
    most = 10 if method in _SUMS or options.get("combine") == "sum" else 30
    return [round(0.1 * step, 1) for step in range(1, most + 1)]
