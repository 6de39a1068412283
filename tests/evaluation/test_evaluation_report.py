"""The folder that an evaluation writes."""

import csv
import json
import re
import shutil
import sys

import pytest
from PIL import Image
from pyarrow import parquet

import massmerge
from eval_suite import Spied, random_world, text_suite, write_suite
from massmerge import MassError, Prediction, Routing
from models import text_bundle


@pytest.fixture(scope="module")
def reported(root, tmp_path_factory):
    """An evaluation with its report."""
    folder = tmp_path_factory.mktemp("reported")
    suite, _ = text_suite(folder, root, shared_labels=[["spam/ham", "mood/positive"]])
    (folder / "topic.csv").write_text((folder / "topic.csv").read_text() + ",arts\n<script>$x$,arts\n")
    report = folder / "report"
    found = massmerge.evaluate(text_bundle(root), suite, experts=True, folder=root / "text", report=report)
    return found, report, suite


def test_the_report_has_its_files(reported):
    _, report, _ = reported
    names = {path.relative_to(report).as_posix() for path in report.rglob("*") if path.is_file()}
    assert {name for name in names if "/" not in name} == {
        "report.md", "report.html", "result.json", "predictions.parquet", "radar.png", "confusion.png", "residuals.png",
        "reliability.png",
    }  # fmt: skip
    assert len([name for name in names if name.startswith("experts/")]) == 3
    for name in ("radar", "confusion", "residuals", "reliability"):
        width, height = Image.open(report / f"{name}.png").size
        assert width > 400 and height > 200


def test_the_page_needs_no_other_file(reported):
    _, report, _ = reported
    page = (report / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 4
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


def test_both_reports_have_every_task_with_its_figures(reported):
    found, report, _ = reported
    for name in ("report.md", "report.html"):
        text = (report / name).read_text()
        for task in found.tasks:
            assert task.task in text
            assert f"{100 * task.strict.value:.1f} %" in text
            assert f"{100 * task.reference:.1f} %" in text
        assert "could not be read" in text
        assert "Wilson" in text and "bootstrap" in text


def test_the_result_is_what_to_dict_gives(reported):
    found, report, _ = reported
    data = json.loads((report / "result.json").read_text())
    assert data == json.loads(json.dumps(found.to_dict()))
    assert data == json.loads(found.to_json())
    assert data["failures"][0]["error"] == "the text cell is empty."


def test_every_answer_is_in_a_table(reported):
    found, report, _ = reported
    rows = parquet.read_table(report / "predictions.parquet").to_pylist()
    assert len(rows) == 38
    for task in found.tasks:
        own = [row for row in rows if row["task"] == task.task]
        assert sum(row["right"] for row in own) / len(own) == pytest.approx(task.strict.value)
        assert sum(row["right_shared"] for row in own) / len(own) == pytest.approx(task.shared.value)
        assert sum(row["label"] == row["label_expert"] for row in own) / len(own) == pytest.approx(task.reference)
        for row in own:
            residuals = {t: row[f"residual_{t}"] for t in ("spam", "topic", "mood")}
            if row["error"] is None:
                assert min(residuals, key=residuals.get) == row["selected"].split()[0]
            else:
                assert set(residuals.values()) == {None}


def test_the_table_is_the_same_however_many_answers_are_written_at_a_time(reported, tmp_path, monkeypatch):
    from massmerge.evaluation import predictions

    found, report, _ = reported
    monkeypatch.setattr(predictions, "_GROUP", 3)
    parts = parquet.ParquetFile(predictions.write_predictions(found, tmp_path))
    assert parts.num_row_groups == 13
    assert parts.read().equals(parquet.read_table(report / "predictions.parquet"))


def test_residuals_are_shown_of_the_own_task_and_the_best_other_one(reported):
    from massmerge.evaluation.summary import residual_pairs

    found, _, _ = reported
    tasks = ["spam", "topic", "mood"]
    for task, (own, other) in residual_pairs(found).items():
        rows = [dict(zip(tasks, r.residuals, strict=True)) for r in found.results if r.task == task and r.residuals]
        assert own.tolist() == [row[task] for row in rows]
        assert other.tolist() == [min(row[t] for t in tasks if t != task) for row in rows]


def test_without_pyarrow_the_table_is_csv(reported, tmp_path, monkeypatch):
    from massmerge.evaluation.predictions import write_predictions

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = write_predictions(reported[0], tmp_path)
    assert path.name == "predictions.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 38
    assert rows[0]["task"] in ("spam", "topic", "mood")


def test_kept_answers_of_experts_are_used_for_the_same_rows_only(reported, root, monkeypatch, tmp_path):
    from massmerge.evaluation import experts

    found, report, suite = reported
    measured = []
    real = experts._measure
    monkeypatch.setattr(experts, "_measure", lambda o, data, *rest: measured.append(data.task) or real(o, data, *rest))
    shutil.copytree(report, tmp_path / "report")
    options = {"experts": True, "folder": root / "text", "report": tmp_path / "report"}
    again = massmerge.evaluate(text_bundle(root), suite, **options)
    assert measured == []
    assert [t.reference for t in again.tasks] == [t.reference for t in found.tasks]
    massmerge.evaluate(text_bundle(root), suite, **options, limit=5, tasks=["spam"])
    assert measured == ["spam"]
    for path in (tmp_path / "report" / "experts").glob("mood-*"):
        path.write_text("{cut off")
    massmerge.evaluate(text_bundle(root), suite, **options, tasks=["mood"])
    assert measured == ["spam", "mood"]


def test_without_matplotlib_a_report_is_refused_at_once_and_figures_are_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    suite, model, *_ = random_world(tmp_path, 0)
    with pytest.raises(MassError, match=r"matplotlib: pip install 'massmerge\[eval\]'"):
        massmerge.evaluate(model, suite, report=tmp_path / "report")
    assert model.calls == []
    assert massmerge.evaluate(model, suite).means["strict"].value > 0


def test_a_bundle_of_one_task_has_nothing_to_route_and_is_reported_all_the_same(tmp_path):
    suite = write_suite(tmp_path, {"a": [("a0", "x"), ("a1", "y")]})

    class Single(Spied):
        def stream(self, inputs, **_):
            routing = Routing({}, {"a": 1.0}, ["a"], "none: the task was given")
            for _item in inputs:
                yield Prediction("a", "x", 0.9, 1.0, routing=routing, timings={"second pass": 1.0, "inputs": 1})

    found = massmerge.evaluate(Single(labels={"a": ("x", "y")}), suite, report=tmp_path / "report")
    assert found.means["routing"].value == 1.0
    assert found.means["strict"].deviation is None
    assert not (tmp_path / "report" / "residuals.png").exists()
