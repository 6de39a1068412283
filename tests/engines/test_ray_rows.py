"""Rows answered on a Ray cluster, and tables of Ray Data."""

import pytest
import ray

import massmerge
import massmerge.model.row_job
from engines.test_row_ranges import figures, predict, table
from eval_suite import text_suite
from models import text_bundle
from study_suite import study_bundle, write_study_suite

pytestmark = pytest.mark.xdist_group("ray")  # one cluster


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch):
    monkeypatch.setattr(massmerge.model.row_job, "_ROWS", 8)


def test_answers_of_a_cluster_are_those_of_one_process(tmp_path, root, cluster):
    bundle, rows = text_bundle(root), table(tmp_path)
    predict(bundle, rows, tmp_path / "here.parquet")
    done = predict(bundle, rows, tmp_path / "there.parquet", "--engine", "ray")
    assert "1 of 45 inputs could not be answered; the others were" in done.stderr
    assert (tmp_path / "there.parquet").read_bytes() == (tmp_path / "here.parquet").read_bytes()


def test_an_evaluation_on_a_cluster_has_the_same_figures_and_rows(tmp_path, root, cluster):
    bundle, suite = text_bundle(root), text_suite(tmp_path, root)[0]
    here = massmerge.evaluate(bundle, suite, batch_size=4)
    there = massmerge.evaluate(bundle, suite, batch_size=4, engine="ray")
    assert figures(there) == figures(here) and there.results == here.results


def test_a_study_on_a_cluster_has_the_same_figures(tmp_path, root, cluster, monkeypatch):
    monkeypatch.setattr("massmerge.research.studies.result.write_report", lambda *args: None)
    bundle, suite = study_bundle(root), write_study_suite(tmp_path)
    found = {}
    for name, engine in (("here", None), ("there", "ray")):
        options = {"bundle": bundle, "out": tmp_path / name, "engine": engine, "quick": True, "batch_size": 4}
        found[name] = massmerge.study("batch", suite, **options)[0].finding.rows
    assert found["there"] == found["here"]


def test_a_predictor_answers_a_table_of_ray_data(root, cluster):
    bundle = text_bundle(root)
    texts = [{"text": text} for text in ("win a free phone", "a moving film", "the team scored a goal")] * 3
    options = {"fn_constructor_args": (str(bundle), "text"), "batch_size": 4, "concurrency": 1}
    found = ray.data.from_items(texts).map_batches(massmerge.Predictor, **options).take_all()
    expected = massmerge.load(bundle).predict([row["text"] for row in texts])
    assert sorted((row["text"], row["task"], row["label"]) for row in found) == sorted(
        (row["text"], one.task, one.label) for row, one in zip(texts, expected, strict=True)
    )
