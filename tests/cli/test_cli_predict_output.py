"""`mass predict`: its formats, and the file that it writes."""

import csv
import errno
import io
import json
import os

import pytest
from pyarrow import parquet

from massmerge.cli import predict as verb
from massmerge.cli import writers
from massmerge.io.rows import NamedInput
from models import contents, text_bundle
from predict_command import inputs_of, rows, run

KINDS = ["jsonl", "csv", "parquet"]
COLUMNS = ["input", "task", "label", "confidence", "score", "weight", "runner_up", "error", "labels", "scores", "value"]


@pytest.fixture(scope="module")
def text(root):
    return str(text_bundle(root))


# Formats


def test_the_terminal_gets_a_table(text):
    done = run(text, "win a prize", "so sad")
    lines = done.output.splitlines()
    assert lines[0].split() == ["task", "label", "confidence", "score", "input"]
    assert lines[1].endswith("win a prize")
    assert len(lines) == 3


def test_json_lines_hold_everything_that_is_known(text):
    found = rows(text, "win a prize")[0]
    assert found.keys() >= {"input", "task", "label", "score", "alternatives", "routing", "timings", "error"}
    assert found["routing"]["weights"].keys() == {"spam", "topic", "mood"}


def test_csv_has_a_row_an_answer(text):
    done = run(text, "win a prize", "so sad", "--format", "csv")
    found = list(csv.DictReader(io.StringIO(done.stdout)))
    assert list(found[0]) == COLUMNS
    assert [row["input"] for row in found] == ["win a prize", "so sad"]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_answers_can_be_written_to_a_file_of_that_kind(text, here, kind):
    done = run(text, "win a prize", "so sad", "--out", f"out.{kind}")
    assert done.exit_code == 0
    assert f"2 answers in out.{kind}" in done.stderr
    assert done.stdout == ""
    if kind == "parquet":
        found = parquet.read_table(here / "out.parquet").to_pylist()
        assert isinstance(found[0]["score"], float)
    elif kind == "csv":
        found = list(csv.DictReader((here / "out.csv").open()))
    else:
        found = [json.loads(line) for line in (here / "out.jsonl").read_text().splitlines()]
    assert [row["input"] for row in found] == ["win a prize", "so sad"]
    assert all(row["task"] in ("spam", "topic", "mood") for row in found)


def test_a_file_of_another_kind_is_an_error_of_the_call(text, here):
    done = run(text, "win", "--out", "out.xlsx")
    assert done.exit_code == 2
    assert "ends in .jsonl, .csv or .parquet" in done.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_cannot_be_written_is_said_by_name(text, here, kind):
    done = run(text, "win", "--out", f"nowhere/out.{kind}")
    assert done.exit_code == 1
    assert f"error: nowhere/out.{kind}: cannot be written (No such file or directory)." in done.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_said_with_the_file(text, kind):
    done = run(text, "win", "--out", "/dev/full", "--format", kind)
    assert done.exit_code == 1
    assert done.stderr == "error: /dev/full: cannot be written (No space left on device).\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--json", "--format", "csv"], "--json means jsonl, --format csv means csv. Leave one of them out."),
        (["--json", "--out", "x.csv"], "--json means jsonl, --out x.csv means csv. Leave one of them out."),
        (["--format", "csv", "--out", "x.jsonl"], "--format csv means csv, --out x.jsonl means jsonl."),
    ],
)
def test_options_that_name_different_formats_are_an_error_of_the_call(text, here, options, words):
    done = run(text, "win", *options)
    assert done.exit_code == 2
    assert words in done.stderr
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("options", [["--json", "--format", "jsonl"], ["--json", "--out", "x.json"]])
def test_options_that_name_the_same_format_go_together(text, here, options):
    assert run(text, "win", *options).exit_code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_is_not_utf_8_is_written_with_escapes(text, here, kind):
    (here / "mail").mkdir()
    (here / "mail" / os.fsdecode(b"\xffx.txt")).write_text("win a prize")
    assert run(text, "mail", "--out", f"out.{kind}").exit_code == 0
    (name,) = inputs_of(here / f"out.{kind}")
    assert name.replace("\udcff", "\\udcff") == "mail/\\udcffx.txt"


@pytest.mark.parametrize("kind", ["table", "jsonl", "csv"])
def test_a_text_that_is_not_utf_8_is_an_error_of_its_row_on_standard_output_too(text, kind):
    done = run(text, os.fsdecode(b"\xff abc"), "win", "--format", kind)
    assert isinstance(done.exception, SystemExit) and done.exit_code == 1
    assert "\\udcff abc" in done.stdout_bytes.decode()
    assert "the text holds bytes that are not UTF-8" in done.stdout


# The file that is written


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_may_be_replaced_by_its_answers(text, here, kind):
    bodies = [f"win a prize {i}" for i in range(20)]
    (here / f"t.{kind}").write_text(
        "body\n" + "\n".join(bodies) if kind == "csv" else "\n".join(json.dumps({"body": body}) for body in bodies)
    )
    done = run(text, f"t.{kind}", "--column", "body", "--out", f"t.{kind}", "--batch-size", "2")
    assert done.exit_code == 0, done.output
    assert inputs_of(here / f"t.{kind}") == [f"t.{kind}:{number}" for number in range(1, 21)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arguments", [["win", "--task", "weather"], ["-"]], ids=["a wrong task", "no input"])
def test_a_run_without_an_answer_leaves_the_file_as_it_was(text, here, kind, arguments):
    (here / f"keep.{kind}").write_bytes(b"mine")
    assert run(text, *arguments, "--out", f"keep.{kind}", stdin="").exit_code
    assert contents(here) == {f"keep.{kind}": b"mine"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_stopped_keeps_its_answers_in_a_draft_and_leaves_the_file_as_it_was(
    text, here, monkeypatch, kind
):
    def stopped(*_, **__):
        for number in range(4):
            yield NamedInput(str(number), "win a prize")
        raise KeyboardInterrupt

    (here / f"keep.{kind}").write_bytes(b"mine")
    monkeypatch.setattr(verb, "read_inputs", stopped)
    done = run(text, "x", "--out", f"keep.{kind}", "--batch-size", "2")
    assert done.exit_code == 1
    assert f"warning: the 4 answers so far are in .keep.{kind}.draft" in done.stderr
    assert (here / f"keep.{kind}").read_bytes() == b"mine"
    kept = (here / f".keep.{kind}.draft").rename(here / f"kept.{kind}")
    assert inputs_of(kept) == ["0", "1", "2", "3"]


def test_strict_keeps_the_answers_before_the_broken_row_in_a_draft(text, here):
    done = run(text, "win", "gone.txt", "--strict", "--out", "out.csv")
    assert done.exit_code == 1
    assert "the 1 answer so far is in .out.csv.draft" in done.stderr
    assert [path.name for path in here.iterdir()] == [".out.csv.draft"]


def test_a_disk_that_runs_full_leaves_the_file_as_it_was_and_no_draft(text, here, monkeypatch):
    def full(writer, name, prediction):
        if name == "sad":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (here / "keep.jsonl").write_bytes(b"mine")
    monkeypatch.setattr(writers.JsonLinesWriter, "write", full)
    done = run(text, "win", "sad", "--out", "keep.jsonl")
    assert done.stderr == "error: keep.jsonl: cannot be written (No space left on device).\n"
    assert contents(here) == {"keep.jsonl": b"mine"}


def test_the_next_run_replaces_the_draft_of_one_that_was_killed(text, here):
    (here / ".out.csv.draft").write_text("half an ans")
    assert run(text, "win", "--out", "out.csv").exit_code == 0
    assert inputs_of(here / "out.csv") == ["win"]
    assert [path.name for path in here.iterdir()] == ["out.csv"]


def test_what_is_no_regular_file_is_written_as_it_is(text, here):
    os.mkfifo(here / "pipe")
    reader = os.open(here / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run(text, "win", "--out", "pipe", "--format", "csv").exit_code == 0
        assert os.read(reader, 1 << 16).decode().splitlines()[1].startswith("win,")
    finally:
        os.close(reader)
    assert (here / "pipe").is_fifo()


def test_a_link_stays_a_link_and_the_file_behind_it_keeps_its_permissions(text, here):
    (here / "real.csv").write_text("old")
    (here / "real.csv").chmod(0o600)
    (here / "link.csv").symlink_to("real.csv")
    assert run(text, "win", "--out", "link.csv").exit_code == 0
    assert (here / "link.csv").is_symlink()
    assert inputs_of(here / "real.csv") == ["win"]
    assert (here / "real.csv").stat().st_mode & 0o777 == 0o600


def test_quiet_prints_nothing_but_what_was_asked_for(text, here):
    assert run(text, "win", "-q").output == ""
    assert run(text, "win", "-q", "--out", "a.csv").output == ""
