"""Rows answered by an engine: the answers of one process, in order, kept when the run is interrupted."""

import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import massmerge
import massmerge.model.row_job
from eval_suite import text_suite
from massmerge import InputError, MassError
from massmerge.cli.demo.example import make_writing_example
from massmerge.cli.main import main
from massmerge.io.row_files import read_inputs, write_inputs
from massmerge.model.row_job import RowWorker
from models import image_bundle, text_bundle
from predict_command import run

WORDS = ["free", "phone", "win", "vote", "film", "moving", "quiet", "game", "team", "goal", "offer", "now"]


@pytest.fixture
def small_ranges(monkeypatch):
    monkeypatch.setattr(massmerge.model.row_job, "_ROWS", 8)


def table(folder, rows=45):
    draw = random.Random(3)
    path = folder / "rows.jsonl"
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(rows)]
    texts[11] = ""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def without_times(path):
    return [{**json.loads(line), "timings": None} for line in path.read_text().splitlines()]


def predict(bundle, rows, out, *options):
    return run(bundle, rows, "--column", "text", "--batch-size", 4, "--out", out, *options)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_answers_of_an_engine_are_those_of_one_process(tmp_path, root, small_ranges, workers, ending):
    bundle, rows = text_bundle(root), table(tmp_path)
    here, there = tmp_path / f"here.{ending}", tmp_path / f"there.{ending}"
    one = predict(bundle, rows, here)
    other = predict(bundle, rows, there, "--engine", "local", "--workers", workers)
    assert (one.exit_code, other.exit_code) == (1, 1) and "1 of 45 inputs could not be answered" in other.stderr
    if ending == "jsonl":
        assert without_times(there) == without_times(here)
    else:
        assert there.read_bytes() == here.read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_pictures_of_a_table_are_answered_by_an_engine(tmp_path, root, small_ranges):
    import pyarrow
    from pyarrow import parquet

    pictures = []
    for seed in range(10):
        buffer = io.BytesIO()
        pixels = np.random.default_rng(seed).integers(0, 255, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, "PNG")
        pictures.append(buffer.getvalue())
    pictures[3] = b"\x89PNG broken"
    parquet.write_table(pyarrow.table({"text": pictures}), tmp_path / "rows.parquet")
    for out, options in ((tmp_path / "here.csv", []), (tmp_path / "there.csv", ["--engine", "local"])):
        assert predict(image_bundle(root), tmp_path / "rows.parquet", out, *options).exit_code == 1
    assert (tmp_path / "there.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()


def test_ranges_that_are_answered_are_not_answered_again(tmp_path, root, small_ranges, monkeypatch):
    bundle, rows, out = text_bundle(root), table(tmp_path), tmp_path / "there.csv"
    real, answered = RowWorker.carry_out, []

    def carry_out(self, unit, before):
        if len(answered) == 3:
            raise MassError("stop")
        answered.append(unit.key)
        return real(self, unit, before)

    with monkeypatch.context() as patched:
        patched.setattr(RowWorker, "carry_out", carry_out)
        assert "stop" in predict(bundle, rows, out, "--engine", "local", "--workers", 1).stderr
    assert not out.exists() and len(answered) == 3
    first, again = list(answered), []
    monkeypatch.setattr(RowWorker, "carry_out", lambda self, unit, b: again.append(unit.key) or real(self, unit, b))
    predict(bundle, rows, out, "--engine", "local", "--workers", 1)
    assert not set(first) & set(again) and len(again) == 6 - 3
    predict(bundle, rows, tmp_path / "here.csv")
    assert out.read_bytes() == (tmp_path / "here.csv").read_bytes()


def test_answers_to_other_rows_or_with_other_options_are_not_taken_over(tmp_path, root, small_ranges, monkeypatch):
    bundle, rows, out = text_bundle(root), table(tmp_path), tmp_path / "there.csv"
    with monkeypatch.context() as patched:
        patched.setattr(massmerge.model.row_job.shutil, "rmtree", lambda path: None)  # as if it was killed at the end
        predict(bundle, rows, out, "--engine", "local")
    rows.write_text(rows.read_text().replace("film", "goal"))
    predict(bundle, rows, out, "--engine", "local", "--top", 1)
    predict(bundle, rows, tmp_path / "here.csv", "--top", 1)
    assert out.read_bytes() == (tmp_path / "here.csv").read_bytes()


@pytest.fixture(scope="module")
def writing(tmp_path_factory):
    """A bundle that writes, and what it is asked."""
    folder = tmp_path_factory.mktemp("writing")
    massmerge.merge(make_writing_example(folder), folder / "out")
    prompts = [{"text": " ".join(WORDS[i : i + 1 + i % 4])} for i in range(11)]
    prompts[5]["text"] = ""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


def generate(folder, out, *options):
    given = ["generate", folder / "out", folder / "prompts.jsonl", "--column", "text", "--max-new-tokens", 3, *options]
    return CliRunner().invoke(main, [*map(str, given), "--batch-size", "4", "--out", str(out)])


def test_texts_generated_by_an_engine_are_those_of_one_process_in_order(tmp_path, writing, small_ranges):
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    one, other = generate(writing, here), generate(writing, there, "--engine", "local", "--workers", 2)
    assert (one.exit_code, other.exit_code) == (1, 1) and "1 of 11 prompts could not be answered" in other.stderr
    assert without_times(there) == without_times(here) and len(without_times(there)) == 11
    assert not list(tmp_path.glob(".*"))


def test_texts_that_were_generated_before_a_stop_are_not_generated_again(tmp_path, writing, small_ranges, monkeypatch):
    real, done = RowWorker.carry_out, []

    def carry_out(self, unit, before):
        if len(done) == 1:
            raise MassError("stop")
        done.append(unit.key)
        return real(self, unit, before)

    out, options = tmp_path / "there.jsonl", ("--engine", "local", "--workers", 1)
    with monkeypatch.context() as patched:
        patched.setattr(RowWorker, "carry_out", carry_out)
        assert "stop" in generate(writing, out, *options).stderr
    assert not out.exists() and len(done) == 1
    monkeypatch.setattr(RowWorker, "carry_out", lambda self, unit, b: done.append(unit.key) or real(self, unit, b))
    generate(writing, out, *options)
    assert len(done) == len(set(done)) == 2 and len(without_times(out)) == 11


@pytest.mark.parametrize("item", ["text", ("one", "two"), [{"role": "user", "content": "hello"}], Path("/a/b")])
def test_a_worker_is_given_the_input_that_the_model_would_have_taken(tmp_path, item):
    write_inputs(tmp_path / "rows", [item])
    assert list(read_inputs(tmp_path / "rows")) == [item]


def test_what_generation_with_an_engine_cannot_do_is_refused(tmp_path, writing):
    asked = [str(writing / "out"), "win a prize"]
    for options, message in (
        (["--engine", "local"], "--engine needs --out FILE"),
        (["--stream", "--out", str(tmp_path / "a.jsonl")], "leave out --out and --engine"),
        (["--out", str(tmp_path / "a.csv")], "generated texts are written as JSON lines"),
    ):
        done = CliRunner().invoke(main, ["generate", *asked, *options])
        assert done.exit_code == 2 and message in done.stderr


def test_what_an_engine_cannot_do_is_refused(tmp_path, root):
    bundle, rows = text_bundle(root), table(tmp_path)
    done = run(bundle, rows, "--column", "text", "--engine", "local")
    assert done.exit_code == 2 and "--engine needs --out FILE" in done.stderr
    done = predict(bundle, rows, tmp_path / "x.csv", "--engine", "local", "--session", "text")
    assert done.exit_code == 2 and "leave out --engine" in done.stderr
    suite = text_suite(tmp_path, root)[0]
    with pytest.raises(InputError, match="an engine needs a bundle's folder"):
        massmerge.evaluate(massmerge.load(bundle), suite, engine="local")


def figures(found):
    return {**found.to_dict(), "timings": None, "created": None}


def test_an_evaluation_by_an_engine_has_the_same_figures_and_rows(tmp_path, root, small_ranges):
    bundle, suite = text_bundle(root), text_suite(tmp_path, root)[0]
    here = massmerge.evaluate(bundle, suite, batch_size=4)
    there = massmerge.evaluate(bundle, suite, batch_size=4, engine="local", workers=2)
    assert figures(there) == figures(here)
    assert there.results == here.results
    assert not list(bundle.parent.glob(".*.eval"))


def test_a_predictor_adds_answers_to_a_batch(root):
    bundle = text_bundle(root)
    batch = {"text": np.array(["win a free phone", "", "a moving film"], dtype=object), "id": np.arange(3)}
    found = massmerge.Predictor(bundle, "text", prefix="mass_")(batch)
    expected = massmerge.load(bundle).predict(["win a free phone", "a moving film"])
    assert [found["mass_task"][i] for i in (0, 2)] == [one.task for one in expected]
    assert [found["mass_score"][i] for i in (0, 2)] == pytest.approx([one.score for one in expected], rel=1e-4)
    assert "is empty" in found["mass_error"][1] and np.isnan(found["mass_score"][1])
    assert found["id"] is batch["id"]


def test_a_predictor_refuses_a_table_that_does_not_fit(root):
    predictor = massmerge.Predictor(text_bundle(root), "text")
    with pytest.raises(InputError, match="no column 'text'; available: 'body'"):
        predictor({"body": ["x"]})
    with pytest.raises(InputError, match=r"the table has label already\. Give a prefix"):
        predictor({"text": ["x"], "label": ["y"]})
