"""Plots of an evaluation: colours that colour-blind people can tell apart, a light ground, room for 20 tasks and more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from massmerge.evaluation.results import Confusion

# From the palette of Okabe and Ito.
BLUE, ORANGE, GREEN, INK, QUIET, FAINT = "#0072B2", "#D55E00", "#009E73", "#22303A", "#5D6B75", "#DDE3E8"
_LEAST_AXES = 3  # a radar of two tasks is a line


def _plain(text: str, most: int = 26) -> str:
    """Text as it is, cut where it is long; between two dollars matplotlib would read mathematics."""
    return (text if len(text) <= most else text[: most - 1] + "…").replace("$", r"\$")


def _new_figure(width: float, height: float) -> Any:
    """A figure that no window and no global state knows of."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white")


def radar(tasks: Sequence[str], series: Mapping[str, Sequence[float]]) -> Any:
    """A polygon for each series of shares over the tasks, the first filled; bars where there are too few tasks.

    Args:
        tasks: names of the axes.
        series: shares from 0 to 1 by name, at most three: the first stands out.
    """
    if len(tasks) < _LEAST_AXES:
        return _bars(tasks, series)
    figure = _new_figure(7.6, 7.6)
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
    axes.grid(color=FAINT, linewidth=0.9)
    axes.spines["polar"].set_color(FAINT)
    looks = [(BLUE, "-", 2.4), (ORANGE, (0, (4, 2)), 1.6), (GREEN, (0, (1, 1.5)), 1.6)]
    for (name, values), (colour, dashes, width) in zip(series.items(), looks, strict=False):
        closed = np.array([*values, values[0]]) * 100
        around = np.append(angles, angles[0])
        axes.plot(around, closed, color=colour, linewidth=width, linestyle=dashes, label=_plain(name, 60), zorder=3)
        if colour == BLUE:
            axes.fill(around, closed, color=colour, alpha=0.12, zorder=2)
            axes.scatter(angles, closed[:-1], color=colour, s=22, zorder=4)
    axes.set_xticks(angles, [""] * len(tasks))
    first = next(iter(series.values()))
    for angle, task, value in zip(angles, tasks, first, strict=True):
        _label_axis(axes, angle, _plain(task), f"{value:.1%}".replace("%", " %"), floor)
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
    figure = _new_figure(7.0, 1.4 + 0.9 * len(tasks))
    axes = figure.add_subplot()
    height = 0.8 / len(series)
    for number, ((name, values), colour) in enumerate(zip(series.items(), (BLUE, ORANGE, GREEN), strict=False)):
        places = np.arange(len(tasks)) + number * height
        bars = axes.barh(places, 100 * np.array(values), height * 0.9, color=colour, label=_plain(name, 60))
        axes.bar_label(bars, fmt="%.1f %%", padding=3, fontsize=9, color=INK)
    axes.set_yticks(np.arange(len(tasks)) + height * (len(series) - 1) / 2, [_plain(task) for task in tasks])
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
    figure = _new_figure(1.9 + cell * len(columns), 1.7 + cell * len(found.tasks))
    axes = figure.add_subplot()
    wrong = np.where(right, np.nan, shares)
    most = max(5.0, float(np.nanmax(wrong))) if not right.all() else 5.0
    axes.imshow(np.where(right, shares, np.nan), cmap="Blues", vmin=0, vmax=130, aspect="equal")
    axes.imshow(np.where(wrong > 0, wrong, np.nan), cmap="Oranges", vmin=-0.08 * most, vmax=1.15 * most, aspect="equal")
    _write_cells(axes, shares, right, most)
    axes.set_xticks(range(len(columns)), [_plain(name) for name in columns], rotation=90, fontsize=9)
    axes.set_yticks(range(len(found.tasks)), [_plain(name) for name in found.tasks], fontsize=9)
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
    figure = _new_figure(3.1 * columns + 0.4, 1.75 * lines + 0.9)
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True)
    everything = np.concatenate([np.concatenate(pair) for pair in found.values()])
    bins = np.linspace(float(everything.min()), float(everything.max()) + 1e-9, 41)
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    for axes, (task, (own, other)) in zip(panels.flat, found.items(), strict=False):
        axes.hist(own, bins, histtype="stepfilled", color=BLUE, alpha=0.75, label="its own task")
        axes.hist(other, bins, histtype="stepfilled", color=ORANGE, alpha=0.55, label="the best other task")
        share = f"{np.mean(own < other):.1%}".replace("%", " %")
        axes.set_title(_plain(task), fontsize=9.5, loc="left", color=INK, pad=4)
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


# Studies


def site_bars(sites: Sequence[str], series: Mapping[str, Mapping[str, float]], line: float, line_name: str) -> Any:
    """A bar for each site and token, a panel for sites of one kind, and a line for what is compared with them.

    Args:
        sites: names such as `M3`, in the order of a forward pass.
        series: for each token the share of each site.
        line: a share.
        line_name: what it is.
    """
    letters = list(dict.fromkeys(site[0] for site in sites))
    columns = min(2, len(letters))
    lines = math.ceil(len(letters) / columns)
    most = max(sum(site[0] == letter for site in sites) for letter in letters)
    figure = _new_figure(columns * max(3.6, 0.28 * most * len(series) + 0.9), 2.5 * lines + 0.4)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes in panels.flat[len(letters) :]:
        axes.set_visible(False)
    for axes, letter in zip(panels.flat, letters, strict=False):
        _site_panel(axes, [site for site in sites if site[0] == letter], series)
        axes.axhline(100 * line, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=3,
                     label=f"{line_name}: {100 * line:.1f} %")  # fmt: skip
        axes.set_ylim(0, 112)
        _quiet_axes(axes, "routing accuracy, %" if axes in panels[:, 0] else "")
    handles, names = panels.flat[0].get_legend_handles_labels()
    figure.tight_layout(h_pad=1.2)
    figure.legend(
        handles, names, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=len(names), frameon=False, fontsize=9.5
    )
    return figure


def _site_panel(axes: Any, sites: Sequence[str], series: Mapping[str, Mapping[str, float]]) -> None:
    width = 0.84 / len(series)
    for number, ((name, shares), colour) in enumerate(zip(series.items(), (BLUE, ORANGE, GREEN), strict=False)):
        places = np.arange(len(sites)) + (number - (len(series) - 1) / 2) * width
        values = [100 * shares[site] for site in sites]
        axes.bar(places, values, width * 0.94, color=colour, label=f"{name} token")
        best = int(np.argmax(values))
        axes.annotate(f"{values[best]:.1f}", (places[best], values[best]), ha="center", va="bottom", fontsize=8, color=INK,
                      xytext=(0, 1.5), textcoords="offset points", zorder=4,
                      bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.3})  # fmt: skip
    axes.set_xticks(range(len(sites)), list(sites))
    axes.set_xlim(-0.7, len(sites) - 0.3)


def _quiet_axes(axes: Any, ylabel: str, xlabel: str = "") -> None:
    """Axes that do not shout: two spines, a faint grid behind the figures."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(colors=INK, labelsize=9, length=3, color=QUIET)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel(ylabel, color=QUIET, fontsize=9.5)
    if xlabel:
        axes.set_xlabel(xlabel, color=QUIET, fontsize=9.5)


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    ylabel: str = "",
    xlabel: str = "",
    mark: tuple[int, int] | None = None,
) -> Any:
    """Shares as coloured cells with their numbers in per cent; darker is better.

    Args:
        rows: names of the rows.
        columns: names of the columns.
        values: a share for each row and column.
        ylabel: what the rows are.
        xlabel: what the columns are.
        mark: row and column of a cell to be framed.
    """
    shares = 100 * np.array(values, dtype=float)
    figure = _new_figure(1.9 + 0.5 * len(columns), 1.3 + 0.42 * len(rows))
    axes = figure.add_subplot()
    low, high = float(np.nanmin(shares)), float(np.nanmax(shares))
    spread = max(1.0, high - low)
    least, most = low - 0.35 * spread, high + 0.15 * spread
    axes.imshow(shares, cmap="Blues", vmin=least, vmax=most, aspect="auto")
    for (i, j), value in np.ndenumerate(shares):
        dark = (value - least) / (most - least) > 0.6
        axes.text(j, i, f"{value:.1f}" if value < 99.95 else "100", ha="center", va="center", fontsize=7.5,
                  color="white" if dark else INK)  # fmt: skip
    axes.set_xticks(range(len(columns)), [_plain(name) for name in columns], fontsize=8.5)
    axes.set_yticks(range(len(rows)), [_plain(name) for name in rows], fontsize=9)
    axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="both", length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if mark is not None:
        from matplotlib.patches import Rectangle

        axes.add_patch(Rectangle((mark[1] - 0.5, mark[0] - 0.5), 1, 1, fill=False, edgecolor=ORANGE, linewidth=2.6,
                                 zorder=6, clip_on=False))  # fmt: skip
    axes.set_xlabel(xlabel, color=QUIET, fontsize=9.5)
    axes.set_ylabel(ylabel, color=QUIET, fontsize=9.5)
    return figure


def ranked_bars(found: Mapping[str, tuple[float, float]], own: str) -> Any:
    """A bar for each name with its interval, in the given order; one name stands out.

    Args:
        found: for each name a share and half of its interval.
        own: the name that stands out.
    """
    names = list(found)
    figure = _new_figure(8.4, 0.9 + 0.3 * len(names))
    axes = figure.add_subplot()
    values = [100 * found[name][0] for name in names]
    margins = [100 * found[name][1] for name in names]
    colours = [BLUE if name == own else "#9DB8CC" for name in names]
    floor = max(0.0, 10 * math.floor((min(values) - max(margins) - 5) / 10))
    axes.barh(range(len(names)), [value - floor for value in values], 0.72, left=floor, color=colours)
    axes.errorbar(values, range(len(names)), xerr=margins, fmt="none", ecolor=INK, elinewidth=1, capsize=2.5)
    for place, (value, margin) in enumerate(zip(values, margins, strict=True)):
        axes.text(min(100.0, value + margin) + 0.8, place, f"{value:.1f}", va="center", fontsize=8.5, color=INK)
    axes.set_yticks(range(len(names)), [_plain(name, 60) for name in names], fontsize=9)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name == own else "normal")
    axes.set_ylim(len(names) - 0.4, -0.6)
    top = min(100, 10 * math.ceil((max(np.add(values, margins)) + 4) / 10))
    axes.set_xlim(floor, top + 6)
    axes.set_xticks(list(range(int(floor), top + 1, 10)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=QUIET, labelsize=8.5)
    axes.set_xlabel("%", color=QUIET, fontsize=9)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure


def curves(
    places: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    logarithmic: bool = False,
    margins: Mapping[str, Sequence[float]] | None = None,
) -> Any:
    """Shares as lines over numbers, each named at the end of its line; intervals as bands.

    Args:
        places: the numbers.
        series: by name a share for each number; the first stands out.
        xlabel: what the numbers are.
        ylabel: what the shares are.
        logarithmic: whether equal steps are equal ratios.
        margins: by name half of each share's interval.
    """
    figure = _new_figure(7.2, 3.9)
    axes = figure.add_subplot()
    looks = [(BLUE, "-", "o"), (ORANGE, (0, (5, 2)), "s"), (GREEN, (0, (1, 1.4)), "^"), (QUIET, (0, (4, 1, 1, 1)), "D")]
    for (name, values), (colour, dashes, marker) in zip(series.items(), looks, strict=False):
        shares = 100 * np.array(values)
        axes.plot(places, shares, color=colour, linestyle=dashes, marker=marker, markersize=5, linewidth=2,
                  label=_plain(name, 60))  # fmt: skip
        if margins and name in margins:
            half = 100 * np.array(margins[name])
            axes.fill_between(
                places, shares - half, np.minimum(100, shares + half), color=colour, alpha=0.12, linewidth=0
            )
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xticks(list(places), [f"{place:g}" for place in places])
    axes.minorticks_off()
    everything = [100 * value for values in series.values() for value in values]
    axes.set_ylim(max(0.0, 5 * math.floor((min(everything) - 6) / 5)), min(101.5, max(everything) + 6))
    _quiet_axes(axes, ylabel, xlabel)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=min(2, len(series)), frameon=False, fontsize=9.5)
    return figure


def trial_curve(series: Mapping[str, Sequence[float]]) -> Any:
    """How a search advanced: the best so far as a line, each trial as a dot.

    Args:
        series: `best so far` and `each trial`, shares in the order of the trials.
    """
    figure = _new_figure(7.2, 3.4)
    axes = figure.add_subplot()
    best, each = (100 * np.array(series[name]) for name in ("best so far", "each trial"))
    axes.scatter(range(len(each)), each, s=20, color="#9DB8CC", label="each trial", zorder=2)
    axes.step(range(len(best)), best, where="post", color=BLUE, linewidth=2, label="best so far", zorder=3)
    _quiet_axes(axes, "accuracy, %", "trial")
    axes.legend(loc="lower right", frameon=False, fontsize=9.5)
    return figure


def multiples(found: Mapping[str, float], own: str) -> Any:
    """A bar for each name, as a multiple of one thing, which is a line; one name stands out.

    Args:
        found: for each name how many times as much.
        own: the name that stands out.
    """
    names = list(found)
    figure = _new_figure(7.6, 0.9 + 0.32 * len(names))
    axes = figure.add_subplot()
    colours = [BLUE if name == own else "#9DB8CC" for name in names]
    bars = axes.barh(range(len(names)), list(found.values()), 0.72, color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=9, color=INK)
    axes.axvline(1.0, color=QUIET, linewidth=0.9)
    axes.set_yticks(range(len(names)), [_plain(name) for name in names])
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name == own else "normal")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(found.values()))
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(QUIET)
    axes.tick_params(axis="y", length=0, labelsize=9.5)
    return figure
