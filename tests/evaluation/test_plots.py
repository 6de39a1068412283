"""Pictures of reports."""

import numpy as np
import pytest

from massmerge.evaluation import plots
from massmerge.evaluation.report import Picture, write_report
from massmerge.evaluation.results import Confusion
from massmerge.research.studies.plots import ranked_bars


@pytest.mark.parametrize("count", [1, 12])
def test_plots_are_drawn_for_few_tasks_and_for_many(tmp_path, count):
    names = tuple(f"a_task_with_a_long_name_$_{i}" for i in range(count))
    shares = np.linspace(0.4, 1.0, count).tolist()
    counts = tuple(tuple(90 if i == j else 1 for j in range(count + 2)) for i in range(count))
    residuals = {name: (np.linspace(-3, -1, 50), np.linspace(-2, 1, 50)) for name in names}
    parts = [
        Picture("radar", "radar", plots.radar(names, {"bundle": shares, "experts": shares})),
        Picture("confusion", "confusion", plots.confusion(Confusion(names, (*names, "unknown", "failed"), counts))),
        Picture("residuals", "residuals", plots.residual_histograms(residuals)),
    ]
    write_report(tmp_path, "plots", parts)
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("radar", "confusion", "residuals"))


@pytest.mark.parametrize(("least", "shown"), [(0.2, False), (0.6, True)])
def test_a_radar_that_does_not_begin_at_nothing_says_where_it_begins(least, shown):
    (axes,) = plots.radar("abcd", {"bundle": [least, 0.9, 0.8, 1.0]}).axes
    assert [text.get_text() for text in axes.texts if text.get_text() == f"{axes.get_ylim()[0]:g} %"] == [
        "40 %"
    ] * shown


def test_bars_begin_at_nothing_however_close_they_are():
    figure = ranked_bars({"mass": (0.973, 0.01), "ties": (0.961, 0.02)}, "mass")
    (axes,) = figure.axes
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [
        (0, pytest.approx(97.3)),
        (0, pytest.approx(96.1)),
    ]
    assert axes.get_xlim()[0] == 0
