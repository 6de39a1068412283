"""Plots of studies: bars, curves and grids of shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from massmerge.io.drawing import BLUE, FAINT, GREEN, INK, ORANGE, PALE, QUIET, new_figure, plain, quiet_axes


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
    figure = new_figure(columns * max(3.6, 0.28 * most * len(series) + 0.9), 2.5 * lines + 0.4)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes in panels.flat[len(letters) :]:
        axes.set_visible(False)
    for axes, letter in zip(panels.flat, letters, strict=False):
        _site_panel(axes, [site for site in sites if site[0] == letter], series)
        axes.axhline(100 * line, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=3,
                     label=f"{line_name}: {100 * line:.1f} %")  # fmt: skip
        axes.set_ylim(0, 112)
        quiet_axes(axes, "routing accuracy, %" if axes in panels[:, 0] else "")
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
    figure = new_figure(1.9 + 0.5 * len(columns), 1.3 + 0.42 * len(rows))
    axes = figure.add_subplot()
    low, high = float(np.nanmin(shares)), float(np.nanmax(shares))
    spread = max(1.0, high - low)
    least, most = low - 0.35 * spread, high + 0.15 * spread
    axes.imshow(shares, cmap="Blues", vmin=least, vmax=most, aspect="auto")
    for (i, j), value in np.ndenumerate(shares):
        dark = (value - least) / (most - least) > 0.6
        axes.text(j, i, f"{value:.1f}" if value < 99.95 else "100", ha="center", va="center", fontsize=7.5,
                  color="white" if dark else INK)  # fmt: skip
    axes.set_xticks(range(len(columns)), [plain(name) for name in columns], fontsize=8.5)
    axes.set_yticks(range(len(rows)), [plain(name) for name in rows], fontsize=9)
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
    figure = new_figure(8.4, 0.9 + 0.3 * len(names))
    axes = figure.add_subplot()
    values = [100 * found[name][0] for name in names]
    margins = [100 * found[name][1] for name in names]
    _named_bars(axes, dict(zip(names, values, strict=True)), own)
    axes.errorbar(values, range(len(names)), xerr=margins, fmt="none", ecolor=INK, elinewidth=1, capsize=2.5)
    for place, (value, margin) in enumerate(zip(values, margins, strict=True)):
        axes.text(min(100.0, value + margin) + 0.8, place, f"{value:.1f}", va="center", fontsize=8.5, color=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    top = min(100, 10 * math.ceil((max(np.add(values, margins)) + 4) / 10))
    axes.set_xlim(0, top + 6)  # from 0: a bar that begins elsewhere makes a small difference look large
    axes.set_xticks(list(range(0, top + 1, 10)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.tick_params(axis="x", colors=QUIET, labelsize=8.5)
    axes.set_xlabel("%", color=QUIET, fontsize=9)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure


def _named_bars(axes: Any, found: Mapping[str, float], own: str) -> Any:
    """Bars from left to right with their names, one of which stands out."""
    bars = axes.barh(range(len(found)), list(found.values()), 0.72, color=[BLUE if n == own else PALE for n in found])
    axes.set_yticks(range(len(found)), [plain(name, 60) for name in found])
    for label, name in zip(axes.get_yticklabels(), found, strict=True):
        label.set_fontweight("bold" if name == own else "normal")
    return bars


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
    figure = new_figure(7.2, 3.9)
    axes = figure.add_subplot()
    looks = [(BLUE, "-", "o"), (ORANGE, (0, (5, 2)), "s"), (GREEN, (0, (1, 1.4)), "^"), (QUIET, (0, (4, 1, 1, 1)), "D")]
    for (name, values), (colour, dashes, marker) in zip(series.items(), looks, strict=False):
        shares = 100 * np.array(values)
        axes.plot(places, shares, color=colour, linestyle=dashes, marker=marker, markersize=5, linewidth=2,
                  label=plain(name, 60))  # fmt: skip
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
    quiet_axes(axes, ylabel, xlabel)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=min(2, len(series)), frameon=False, fontsize=9.5)
    return figure


def trial_curve(series: Mapping[str, Sequence[float]]) -> Any:
    """How a search advanced: the best so far as a line, each trial as a dot.

    Args:
        series: `best so far` and `each trial`, shares in the order of the trials.
    """
    figure = new_figure(7.2, 3.4)
    axes = figure.add_subplot()
    best, each = (100 * np.array(series[name]) for name in ("best so far", "each trial"))
    axes.scatter(range(len(each)), each, s=20, color=PALE, label="each trial", zorder=2)
    axes.step(range(len(best)), best, where="post", color=BLUE, linewidth=2, label="best so far", zorder=3)
    quiet_axes(axes, "accuracy, %", "trial")
    axes.legend(loc="lower right", frameon=False, fontsize=9.5)
    return figure


def multiples(found: Mapping[str, float], own: str) -> Any:
    """A bar for each name, as a multiple of one thing, which is a line; one name stands out.

    Args:
        found: for each name how many times as much.
        own: the name that stands out.
    """
    names = list(found)
    figure = new_figure(7.6, 0.9 + 0.32 * len(names))
    axes = figure.add_subplot()
    bars = _named_bars(axes, found, own)
    axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=9, color=INK)
    axes.axvline(1.0, color=QUIET, linewidth=0.9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(found.values()))
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(QUIET)
    axes.tick_params(axis="y", length=0, labelsize=9.5)
    return figure
