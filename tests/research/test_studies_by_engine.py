"""Studies whose rows an engine answers: the figures and the kept answers are those of one process."""

import json

import pytest
from click.testing import CliRunner

import massmerge
from massmerge import InputError
from massmerge.cli.main import main
from massmerge.model.row_job import RowWorker
from massmerge.research.studies import STUDIES
from study_suite import study_bundle, write_study_suite

BY_ENGINE = ("routers", "sweep", "ablation", "batch")


@pytest.fixture(scope="module")
def bundle(root):
    return study_bundle(root)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return write_study_suite(tmp_path_factory.mktemp("suite"))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Ranges of a few rows, and no plots, which take longer than tiny models."""
    monkeypatch.setattr("massmerge.model.row_job._ROWS", 8)
    monkeypatch.setattr("massmerge.research.studies.result.write_report", lambda *args: None)


@pytest.fixture
def answered(monkeypatch):
    """Units that workers have done."""
    real, seen = RowWorker.carry_out, []
    monkeypatch.setattr(RowWorker, "carry_out", lambda self, u, before: seen.append(u.key) or real(self, u, before))
    return seen


def cells(out):
    lines = (out / "cache" / "cells.jsonl").read_text().splitlines()
    return sorted((cell["key"], json.dumps(cell["value"])) for cell in map(json.loads, lines) if cell["value"])


def run(name, suite, bundle, out, **options):
    given = {"recipe": bundle.parent / "recipe.yaml", "quick": True, "batch_size": 4, **options}
    (found,) = massmerge.study(name, suite, bundle=bundle, out=out, **given)
    return json.dumps([found.finding.rows, vars(found.finding.verdict)])


@pytest.mark.parametrize("name", BY_ENGINE)
def test_figures_and_kept_answers_are_those_of_one_process(name, suite, bundle, tmp_path, answered):
    here = run(name, suite, bundle, tmp_path / "here")
    assert not answered
    there = run(name, suite, bundle, tmp_path / "there", engine="local", workers=2)
    assert answered and there == here
    assert cells(tmp_path / "there") == cells(tmp_path / "here")
    assert not list((tmp_path / "there" / "cache").glob("*.parts"))


def test_a_study_that_was_stopped_goes_on_with_what_its_workers_have_answered(suite, bundle, tmp_path, monkeypatch):
    real, done = RowWorker.carry_out, []

    def carry_out(self, unit, before):
        if len(done) == 3:
            raise massmerge.MassError("stop")
        done.append(unit.data.rows)
        return real(self, unit, before)

    with monkeypatch.context() as patched:
        patched.setattr(RowWorker, "carry_out", carry_out)
        with pytest.raises(massmerge.MassError, match="stop"):
            run("batch", suite, bundle, tmp_path / "out", engine="local", workers=1)
    again = []
    monkeypatch.setattr(
        RowWorker, "carry_out", lambda self, unit, b: again.append(unit.data.rows) or real(self, unit, b)
    )
    found = run("batch", suite, bundle, tmp_path / "out", engine="local", workers=1)
    assert again and not set(done) & set(again)
    assert found == run("batch", suite, bundle, tmp_path / "here")


@pytest.mark.parametrize("name", [name for name in STUDIES if name not in BY_ENGINE])
def test_a_study_whose_rows_an_engine_cannot_answer_is_refused_in_words(name, suite, bundle, tmp_path):
    with pytest.raises(
        InputError, match=rf"study {name}: .*Leave out --engine; the studies that it serves are routers,"
    ):
        run(name, suite, bundle, tmp_path / "out", engine="local")
    assert not (tmp_path / "out").exists()


def test_workers_without_an_engine_are_refused(suite, bundle, tmp_path):
    with pytest.raises(InputError, match="--workers counts the workers of an engine"):
        run("batch", suite, bundle, tmp_path / "out", workers=2)


def test_the_command_takes_an_engine(suite, bundle, tmp_path):
    given = ["study", "batch", suite, "--bundle", bundle, "--out", tmp_path / "out", "--quick", "--engine", "local"]
    done = CliRunner().invoke(main, [*map(str, given), "--workers", "1", "--batch-size", "4"])
    assert done.exit_code == 0, done.output
    assert "rows go to the workers" in done.stderr
