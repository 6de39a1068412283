"""What all plots share: colours that colour-blind people can tell apart, a light ground, axes that do not shout."""

from __future__ import annotations

from typing import Any

from massmerge.errors import MassError

# From the palette of Okabe and Ito.
BLUE, ORANGE, GREEN, INK, QUIET, FAINT = "#0072B2", "#D55E00", "#009E73", "#22303A", "#5D6B75", "#DDE3E8"
PALE = "#9DB8CC"  # bars beside the one that stands out


def plain(text: str, most: int = 26) -> str:
    """Text as it is, cut where it is long; between two dollars matplotlib would read mathematics."""
    return (text if len(text) <= most else text[: most - 1] + "…").replace("$", r"\$")


def pyplot() -> Any:
    """The part of matplotlib that draws to files and opens no window.

    Raises:
        MassError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise MassError("plots need matplotlib: pip install 'massmerge[eval]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def new_figure(width: float, height: float) -> Any:
    """A figure that no window and no global state knows of."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white")


def quiet_axes(axes: Any, ylabel: str, xlabel: str = "") -> None:
    """Axes that do not shout: two spines, a faint grid behind the figures."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(colors=INK, labelsize=9, length=3, color=QUIET)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel(ylabel, color=QUIET, fontsize=9.5)
    if xlabel:
        axes.set_xlabel(xlabel, color=QUIET, fontsize=9.5)
