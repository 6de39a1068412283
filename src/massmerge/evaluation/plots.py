"""Plots of an evaluation, with room for 20 tasks and more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from massmerge.evaluation.reliability import Reliability
from massmerge.evaluation.results import Confusion
from massmerge.io.drawing import BLUE, FAINT, GREEN, INK, ORANGE, PALE, QUIET, new_figure, plain, quiet_axes

_LEAST_AXES = 3  # a radar of two tasks is a line


def radar(tasks: Sequence[str], series: Mapping[str, Sequence[float]]) -> Any:
    """A polygon for each series of shares over the tasks, the first filled; bars where there are too few tasks.

    Args:
        tasks: names of the axes.
        series: shares from 0 to 1 by name, at most three: the first stands out.
    """
    if len(tasks) < _LEAST_AXES:
        return _bars(tasks, series)
    figure = new_figure(7.6, 7.6)
    axes = figure.add_axes((0.16, 0.14, 0.68, 0.68), projection="polar")
    angles = np.linspace(0, 2 * math.pi, len(tasks), endpoint=False)
    floor = _floor([value for values in series.values() for value in values])
    axes.set_theta_offset(math.pi / 2)
    axes.set_theta_direction(-1)
    axes.set_ylim(floor, 100)
    axes.set_rlabel_position(180 / len(tasks))
    rings = np.linspace(floor, 100, 5)[1:]
    axes.set_yticks(rings, [f"{ring:g} %" for ring in rings], fontsize=8, color=QUIET, zorder=5)
    for label in axes.get_yticklabels():
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6})
    if floor:  # a reader must see that the area does not begin at nothing
        box = {"facecolor": "white", "edgecolor": QUIET, "boxstyle": "round,pad=0.25", "linewidth": 0.8}
        axes.text(0, floor, f"{floor:g} %", ha="center", va="center", fontsize=8, color=INK, zorder=5, bbox=box)
    axes.grid(color=FAINT, linewidth=0.9)
    axes.spines["polar"].set_color(FAINT)
    looks = [(BLUE, "-", 2.4), (ORANGE, (0, (4, 2)), 1.6), (GREEN, (0, (1, 1.5)), 1.6)]
    for (name, values), (colour, dashes, width) in zip(series.items(), looks, strict=False):
        closed = np.array([*values, values[0]]) * 100
        around = np.append(angles, angles[0])
        axes.plot(around, closed, color=colour, linewidth=width, linestyle=dashes, label=plain(name, 60), zorder=3)
        if colour == BLUE:
            axes.fill(around, closed, color=colour, alpha=0.12, zorder=2)
            axes.scatter(angles, closed[:-1], color=colour, s=22, zorder=4)
    axes.set_xticks(angles, [""] * len(tasks))
    first = next(iter(series.values()))
    for angle, task, value in zip(angles, tasks, first, strict=True):
        _label_axis(axes, angle, plain(task), f"{value:.1%}".replace("%", " %"), floor)
    figure.legend(loc="lower center", ncols=len(series), frameon=False, fontsize=10, bbox_to_anchor=(0.5, 0.0))
    return figure


def _label_axis(axes: Any, angle: float, task: str, value: str, floor: float) -> None:
    """A task's name and figure outside of the outer ring, on the side that leads away from it."""
    side = math.sin(angle)
    align = "center" if abs(side) < 0.15 else "left" if side > 0 else "right"
    vertical = "bottom" if math.cos(angle) > 0.15 else "top" if math.cos(angle) < -0.15 else "center"
    radius = floor + (100 - floor) * 1.06
    axes.text(angle, radius, f"{task}\n{value}", ha=align, va=vertical, fontsize=9, color=INK, linespacing=1.25)


def _floor(shares: Sequence[float]) -> float:
    """Where the axes begin, in per cent: below the least value, so that polygons are not all one at the rim."""
    least = 100 * min(shares)
    return float(max(0, 20 * math.floor((least - 10) / 20)))


def _bars(tasks: Sequence[str], series: Mapping[str, Sequence[float]]) -> Any:
    figure = new_figure(7.0, 1.4 + 0.9 * len(tasks))
    axes = figure.add_subplot()
    height = 0.8 / len(series)
    for number, ((name, values), colour) in enumerate(zip(series.items(), (BLUE, ORANGE, GREEN), strict=False)):
        places = np.arange(len(tasks)) + number * height
        bars = axes.barh(places, 100 * np.array(values), height * 0.9, color=colour, label=plain(name, 60))
        axes.bar_label(bars, fmt="%.1f %%", padding=3, fontsize=9, color=INK)
    axes.set_yticks(np.arange(len(tasks)) + height * (len(series) - 1) / 2, [plain(task) for task in tasks])
    axes.invert_yaxis()
    axes.set_xlim(0, 112)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(QUIET)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=len(series), frameon=False, fontsize=10)
    return figure


def confusion(found: Confusion) -> Any:
    """Share of each task's rows by where they were routed: right ones in blue, wrong ones in a scale of their own."""
    counts = np.array(found.counts, dtype=float)
    used = [i for i, name in enumerate(found.columns) if name in found.tasks or counts[:, i].any()]
    columns = [found.columns[i] for i in used]
    shares = 100 * counts[:, used] / counts.sum(1, keepdims=True)
    right = np.array([[row == column for column in columns] for row in found.tasks])
    cell = 0.52 if len(columns) <= 12 else 0.44
    figure = new_figure(1.9 + cell * len(columns), 1.7 + cell * len(found.tasks))
    axes = figure.add_subplot()
    wrong = np.where(right, np.nan, shares)
    most = max(5.0, float(np.nanmax(wrong))) if not right.all() else 5.0
    axes.imshow(np.where(right, shares, np.nan), cmap="Blues", vmin=0, vmax=130, aspect="equal")
    axes.imshow(np.where(wrong > 0, wrong, np.nan), cmap="Oranges", vmin=-0.08 * most, vmax=1.15 * most, aspect="equal")
    _write_cells(axes, shares, right, most)
    axes.set_xticks(range(len(columns)), [plain(name) for name in columns], rotation=90, fontsize=9)
    axes.set_yticks(range(len(found.tasks)), [plain(name) for name in found.tasks], fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, colors=INK)
    axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(found.tasks) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    axes.set_facecolor("#F4F6F8")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_ylabel("rows of the task", color=QUIET, fontsize=9)
    axes.set_xlabel("routed to (% of the row's task)", color=QUIET, fontsize=9)
    axes.xaxis.set_label_position("bottom")
    return figure


def _write_cells(axes: Any, shares: NDArray[np.float64], right: NDArray[np.bool_], most: float) -> None:
    for (i, j), value in np.ndenumerate(shares):
        if value == 0 and not right[i, j]:
            continue
        dark = value > 75 if right[i, j] else value > 0.75 * most
        digits = 0 if value >= 99.95 or value == 0 else 1
        axes.text(j, i, f"{value:.{digits}f}", ha="center", va="center", fontsize=7.5, color="white" if dark else INK)


def residual_histograms(found: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]) -> Any:
    """For each task a panel: the residual of its own rows in its own subspace, and the least of the other tasks'.

    Args:
        found: for each task two arrays (rows,): own residual, least of the others.
    """
    columns = min(4 if len(found) > 9 else 3, len(found))
    lines = math.ceil(len(found) / columns)
    figure = new_figure(3.1 * columns + 0.4, 1.75 * lines + 0.9)
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True)
    everything = np.concatenate([np.concatenate(pair) for pair in found.values()])
    bins = np.linspace(float(everything.min()), float(everything.max()) + 1e-9, 41)
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    for axes, (task, (own, other)) in zip(panels.flat, found.items(), strict=False):
        axes.hist(own, bins, histtype="stepfilled", color=BLUE, alpha=0.75, label="its own task")
        axes.hist(other, bins, histtype="stepfilled", color=ORANGE, alpha=0.55, label="the best other task")
        share = f"{np.mean(own < other):.1%}".replace("%", " %")
        axes.set_title(plain(task), fontsize=9.5, loc="left", color=INK, pad=4)
        axes.set_title(share, fontsize=9, loc="right", color=QUIET, pad=4)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(QUIET)
        axes.tick_params(axis="x", labelsize=8, colors=QUIET, labelbottom=True)
    handles, names = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", ncols=2, frameon=False, fontsize=10, bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout(rect=(0, 0.0, 1, 1 - 0.35 / (1.75 * lines + 0.9)))
    words = "residual (less is better); beside each name: share of rows where the own task's is the least"
    figure.text(0.5, 0.0, words, ha="center", va="top", fontsize=9, color=QUIET)
    return figure


def reliability(found: Reliability) -> Any:
    """Accuracy by confidence beside its ideal, how many answers have which, and accuracy against coverage."""
    figure = new_figure(9.6, 4.4)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.28})
    middles = [(one.low + one.high) / 2 for one in found.bins]
    widths = [0.92 * (one.high - one.low) for one in found.bins]
    left.bar(middles, [one.share for one in found.bins], widths, color=PALE, label="share of the answers", zorder=2)
    left.plot([0, 1], [0, 1], color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)), label="ideal", zorder=3)
    dots = ([one.confidence for one in found.bins], [one.accuracy for one in found.bins])
    left.plot(*dots, color=BLUE, linewidth=2, marker="o", markersize=5, label="accuracy", zorder=4)
    left.set_xlim(0, 1)
    left.set_ylim(0, 1.02)
    quiet_axes(left, "accuracy, share", "confidence")
    left.legend(loc="upper left", frameon=False, fontsize=9)
    left.set_title(f"calibration error {found.calibration_error:.3f}", fontsize=10, loc="right", color=QUIET)
    coverage, accuracy = zip(*found.curve, strict=True)
    right.plot([100 * share for share in coverage], [100 * share for share in accuracy], color=BLUE, linewidth=2)
    marked = {float(name.rstrip("%")): 100 * share for name, share in found.accuracy_at.items()}
    right.scatter(marked.keys(), marked.values(), color=BLUE, s=26, zorder=4)
    for place, value in marked.items():
        right.annotate(
            f"{value:.1f}", (place, value), (0, 8), textcoords="offset points", ha="center", fontsize=9, color=INK
        )
    low = min(*marked.values(), *(100 * share for share in accuracy))
    right.set_xlim(0, 104)
    right.set_ylim(max(0.0, low - 5), min(104.0, 100 + 0.15 * (105 - low)))
    quiet_axes(right, "accuracy of these, %", "surest answers, % of all")
    return figure
