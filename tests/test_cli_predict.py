"""`mass predict`: inputs from everywhere, answers in every format, errors by row."""

import csv
import errno
import io
import json
import os
import struct
import warnings
import zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from pyarrow import parquet

import massmerge
from massmerge.cli import predict as verb
from massmerge.cli import writers
from massmerge.cli.main import main
from massmerge.rows import NamedInput
from models import contents, family_bundle, image_bundle, text_bundle, with_options

KINDS = ["jsonl", "csv", "parquet"]
COLUMNS = ["input", "task", "label", "score", "weight", "runner_up", "error"]


@pytest.fixture(scope="module")
def text(root):
    return str(text_bundle(root))


@pytest.fixture(scope="module")
def image(root):
    return str(image_bundle(root))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments, stdin=None):
    return CliRunner().invoke(main, ["predict", *map(str, arguments)], input=stdin)


def rows(*arguments, stdin=None, code=0):
    """The answers as JSON lines."""
    done = run(*arguments, "--json", stdin=stdin)
    assert done.exit_code == code, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def inputs_of(path):
    """The column `input` of a file of answers."""
    if path.suffix == ".parquet":
        return parquet.read_table(path)["input"].to_pylist()
    lines = path.read_text(encoding="utf-8").splitlines()
    found = csv.DictReader(lines) if path.suffix == ".csv" else map(json.loads, lines)
    return [row["input"] for row in found]


def forbid(monkeypatch, name):
    """A file that may not be read; tests may run as root, who may read all."""
    opened = Path.open

    def refused(path, *arguments, **options):
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refused)


def picture(path, seed=0):
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(path)
    return path


# Where inputs come from


def test_text_on_the_command_line_is_answered_as_by_the_model(text):
    found = rows(text, "win a prize", "so sad")
    expected = massmerge.load(text).predict(["win a prize", "so sad"])
    assert [(r["input"], r["task"], r["label"]) for r in found] == [
        ("win a prize", expected[0].task, expected[0].label),
        ("so sad", expected[1].task, expected[1].label),
    ]


def test_lines_of_standard_input_are_answered(text):
    assert [r["input"] for r in rows(text, "-", stdin="win a prize\n\nso sad\n")] == ["-:1", "-:3"]


def test_standard_input_that_is_not_utf_8_is_an_error_of_its_row(text):
    found = rows(text, "-", stdin=b"caf\xe9\n", code=1)
    assert "not UTF-8" in found[0]["error"]


def test_a_text_file_is_answered_line_by_line(text, here):
    (here / "a.txt").write_text("win a prize\nso sad\n")
    assert [r["input"] for r in rows(text, "a.txt")] == ["a.txt:1", "a.txt:2"]


def test_a_folder_of_texts_is_answered_file_by_file(text, here):
    (here / "mail").mkdir()
    (here / "mail" / "b.txt").write_text("win\na prize")
    (here / "mail" / "a.txt").write_text("so sad")
    assert [r["input"] for r in rows(text, "mail")] == ["mail/a.txt", "mail/b.txt"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_column_of_a_table_is_answered_row_by_row(text, here, kind):
    data = [{"id": 1, "body": "win a prize"}, {"id": 2, "body": "so sad"}]
    if kind == "parquet":
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(data), here / "t.parquet")
    elif kind == "jsonl":
        (here / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    else:
        (here / "t.csv").write_text("id,body\n1,win a prize\n2,so sad\n")
    found = rows(text, f"t.{kind}", "--column", "body")
    direct = rows(text, "win a prize", "so sad")
    assert [(r["task"], r["label"]) for r in found] == [(r["task"], r["label"]) for r in direct]


def test_image_files_and_folders_of_images_are_answered(image, here):
    (here / "pictures").mkdir()
    picture(here / "pictures" / "b.png", 1)
    picture(here / "pictures" / "a.jpg", 2)
    picture(here / "c.png", 3)
    found = rows(image, "c.png", "pictures")
    assert [r["input"] for r in found] == ["c.png", "pictures/a.jpg", "pictures/b.png"]
    assert all(r["task"] in ("a", "b") for r in found)


def test_pictures_named_by_a_table_are_answered(image, here):
    (here / "data").mkdir()
    picture(here / "data" / "x.png")
    (here / "data" / "t.csv").write_text("file\nx.png\n")
    assert rows(image, "data/t.csv", "--column", "file")[0]["task"]


def test_inputs_of_several_kinds_may_stand_in_one_call(text, here):
    (here / "a.txt").write_text("so sad\n")
    assert [r["input"] for r in rows(text, "win", "a.txt", "-", stdin="free\n")] == ["win", "a.txt:1", "-:1"]


# Formats


def test_the_terminal_gets_a_table(text):
    done = run(text, "win a prize", "so sad")
    lines = done.output.splitlines()
    assert lines[0].split() == ["task", "label", "score", "weight", "input"]
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


# Errors by row


def test_a_broken_image_is_an_error_of_its_row_and_the_others_go_on(image, here):
    picture(here / "a.png", 1)
    (here / "b.png").write_bytes(b"not a picture")
    picture(here / "c.png", 2)
    found = rows(image, "a.png", "b.png", "c.png", code=1)
    assert [r["task"] is None for r in found] == [False, True, False]
    assert "b.png: not an image that can be read" in found[1]["error"]
    assert [r["error"] for r in (found[0], found[2])] == [None, None]


def test_broken_rows_are_counted_at_the_end_with_exit_code_1(image, here):
    picture(here / "a.png")
    done = run(image, "a.png", "gone.png", "gone2.png")
    assert done.exit_code == 1
    assert "error: 2 of 3 inputs could not be read; the others were answered." in done.stderr


def test_the_table_names_the_row_that_is_broken(text, here):
    (here / "t.csv").write_text("text,id\n,1\nwin,2\n")
    done = run(text, "t.csv", "--column", "text")
    assert done.exit_code == 1
    assert any(line.startswith("error ") and "t.csv:1: the column 'text' is empty." in line
               for line in done.stdout.splitlines())  # fmt: skip


def test_an_empty_text_in_the_table_is_named_by_where_it_stands(text, here):
    (here / "t.jsonl").write_text('{"text": "win"}\n{"text": "  "}\n')
    assert "t.jsonl:2: empty text." in run(text, "t.jsonl", "--column", "text").stdout


def test_a_broken_line_is_told_with_its_place_once(text, here):
    (here / "t.jsonl").write_text('{"text": "win"}\n\n{"text": \n')
    done = run(text, "t.jsonl", "--column", "text")
    assert done.stdout.splitlines()[-1] == "error            t.jsonl:3: not valid JSON (Expecting value, column 10)."


def test_a_column_that_is_not_there_is_told_with_the_path_once(text, here):
    (here / "t.csv").write_text("body\nwin\n")
    done = run(text, "t.csv", "--column", "text")
    assert done.stdout.splitlines()[-1] == "error            t.csv: no column 'text'; there are 'body'."


def test_a_file_that_may_not_be_read_is_an_error_of_its_row_and_the_others_go_on(text, here, monkeypatch):
    (here / "ok.txt").write_text("so sad")
    (here / "secret.txt").write_text("win")
    forbid(monkeypatch, "secret.txt")
    found = rows(text, "ok.txt", "secret.txt", "hello", code=1)
    assert [(r["input"], r["error"]) for r in found] == [
        ("ok.txt:1", None),
        ("secret.txt", "secret.txt: cannot be read (Permission denied)."),
        ("hello", None),
    ]


def test_strict_stops_at_the_first_broken_row_and_names_it(text, here):
    (here / "t.jsonl").write_text('{"text": "win"}\n{"text": "  "}\n{"text": "free"}\n')
    done = run(text, "t.jsonl", "--column", "text", "--strict", "--json")
    assert done.exit_code == 1
    assert "error: t.jsonl:2: empty text." in done.stderr
    assert [json.loads(line)["input"] for line in done.stdout.splitlines()] == ["t.jsonl:1"]


def test_answers_before_a_broken_row_are_kept_in_every_format(text, here):
    for kind in ("csv", "jsonl", "parquet"):
        assert run(text, "win", "gone.txt", "so sad", "--out", f"out.{kind}").exit_code == 1
    assert len(parquet.read_table(here / "out.parquet")) == 3
    assert len((here / "out.jsonl").read_text().splitlines()) == 3
    assert len(list(csv.DictReader((here / "out.csv").open()))) == 3


def test_an_image_of_50000_by_50000_pixels_is_an_error_of_its_row(image, here):
    picture(here / "a.png")
    data = bytearray((here / "a.png").read_bytes())
    data[16:24] = struct.pack(">II", 50_000, 50_000)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    (here / "huge.png").write_bytes(bytes(data))
    found = rows(image, "a.png", "huge.png", code=1)
    assert found[0]["task"]
    assert "at most 100,000,000 are decoded" in found[1]["error"]


def test_no_input_at_all_is_said(text):
    done = run(text, "-", stdin="\n\n")
    assert done.exit_code == 1
    assert "there was no input to answer" in done.output


def test_a_call_without_inputs_is_wrong(text):
    assert run(text).exit_code == 2


def test_a_truncated_text_is_answered_with_a_warning_of_one_line(text, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # the command sets its own
    with pytest.warns(UserWarning, match="truncated") as said:
        assert rows(text, "win " * 900)[0]["task"]
    shown = warnings.formatwarning(said[0].message, said[0].category, said[0].filename, said[0].lineno)
    assert shown == "warning: text of more than 512 tokens was truncated (said once)\n"


# Options


def test_a_task_skips_routing_and_several_restrict_it(text):
    assert rows(text, "so sad", "--task", "topic")[0]["task"] == "topic"
    found = rows(text, "so sad", "--task", "topic", "--task", "spam")[0]
    assert found["routing"]["weights"].keys() == {"spam", "topic"}


def test_an_unknown_task_is_an_error_of_the_call_with_those_there_are(text):
    done = run(text, "so sad", "--task", "weather")
    assert done.exit_code == 2
    assert "no task 'weather'. There are spam, topic, mood." in done.output


def test_top_is_the_number_of_answers(text):
    found = rows(text, "so sad", "--task", "topic", "--top", "4")[0]
    assert len(found["alternatives"]) == 3


def test_route_batch_decides_once(text):
    found = rows(text, "win", "so sad", "vote law", "--route", "batch")
    assert len({r["task"] for r in found}) == 1


def test_a_cache_does_not_change_the_answers(text):
    plain = rows(text, *["win", "so sad"] * 4, "--batch-size", "2")
    cached = rows(text, *["win", "so sad"] * 4, "--batch-size", "2", "--cache", "64MB")
    assert [(r["task"], r["label"]) for r in cached] == [(r["task"], r["label"]) for r in plain]


def test_an_unknown_input_is_a_line_of_the_table_and_no_error(root, here):
    bundle = with_options(text_bundle(root), here / "bundle", unknown={"lift": 1e6})
    done = run(bundle, "win")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[1].startswith("unknown ")


def test_the_input_stands_in_the_same_column_whether_known_or_not(root, here):
    lifts = [r.lift for r in massmerge.load(text_bundle(root)).route(["win a prize", "so sad"])]
    bundle = with_options(text_bundle(root), here / "bundle", unknown={"lift": sum(lifts) / 2})
    lines = run(bundle, "win a prize", "so sad").stdout.splitlines()
    assert len({line.startswith("unknown") for line in lines[1:]}) == 2
    assert lines[1].index("win a prize") == lines[2].index("so sad") == lines[0].index("input")


def test_answers_are_written_while_inputs_still_come(text, monkeypatch):
    """Memory does not grow with the inputs: no more of them are read than one batch ahead of what is written."""
    taken, ahead = [], []

    def endless(*_, **__):
        for i in range(40):
            taken.append(i)
            yield NamedInput(str(i), "win a prize")

    class Recorder:
        written = 0

        def write(self, name, prediction):
            self.written += 1
            ahead.append(len(taken) - self.written)

    monkeypatch.setattr(verb, "read_inputs", endless)
    monkeypatch.setattr(verb, "open_writer", lambda *_: nullcontext(Recorder()))
    assert run(text, "x", "--batch-size", "4").exit_code == 0
    assert len(ahead) == 40
    assert max(ahead) <= 4


# Bundles


def test_what_is_no_bundle_is_an_error_of_the_call(here):
    (here / "empty").mkdir()
    done = run("empty", "win")
    assert done.exit_code == 2
    assert "empty: not a bundle (no mass.json in it)" in done.output


def test_a_damaged_bundle_is_an_error_of_the_call(root, here):
    bundle = with_options(text_bundle(root), here / "bundle")
    (bundle / "base" / "model.safetensors").write_bytes(b"short")
    done = run(bundle, "win")
    assert done.exit_code == 2
    assert "base/model.safetensors: 5 bytes, should be" in done.output


@pytest.mark.parametrize("item", ["win", "a.txt"])
def test_a_bundle_without_a_tokenizer_is_an_error_of_the_call(root, here, item):
    (here / "a.txt").write_text("win\n")
    done = run(family_bundle(root, "bert"), item)
    assert done.exit_code == 2
    assert "the bundle has no tokenizer that can be loaded" in done.stderr
    assert done.stdout == ""
