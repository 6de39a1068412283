"""A picture of interpretations: a panel for each task and site, a bar for each text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from massmerge.errors import InputError, MassError

if TYPE_CHECKING:
    from massmerge.research.interpret.decoding import Interpretation

_FORMATS = (".png", ".svg", ".pdf")
_COLUMNS, _BLUE, _INK = 2, "#0072B2", "#22303A"


def refuse_other_format(path: Path) -> None:
    """Raise an error if a plot cannot be drawn to a file of that name."""
    if path.suffix.lower() not in _FORMATS:
        raise InputError(f"{path}: not a supported plot format. Use .png, .svg or .pdf.")


def save_plot(found: Sequence[Interpretation], path: Path) -> None:
    """Draw interpretations to a file.

    Raises:
        InputError: matplotlib is missing.
        MassError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("plots need matplotlib: pip install 'massmerge[eval]'") from None
    columns = min(_COLUMNS, len(found))
    rows = -(-len(found) // columns)
    most = max(len(one.texts) for one in found)
    figure = Figure(figsize=(7.0 * columns, rows * (0.8 + 0.3 * most)), facecolor="white", layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, one in zip(axes, found, strict=False):
        places = range(len(one.texts))
        axis.barh(places, [100 * text.share for text in one.texts], color=_BLUE, height=0.6)
        # Between two dollars matplotlib would read mathematics.
        axis.set_yticks(places, [text.text[:48].replace("$", r"\$") for text in one.texts], fontsize=8, color=_INK)
        axis.invert_yaxis()
        axis.set_xlabel("share of the variance, %", fontsize=8)
        axis.set_title(f"{one.task} at {one.site}", fontsize=10, color=_INK, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(found) :]:
        axis.set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise MassError(f"{path}: cannot be written ({error.strerror}).") from None
