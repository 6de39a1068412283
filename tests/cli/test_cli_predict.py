"""`mass predict`: inputs from everywhere, errors by row, options."""

import csv
import errno
import json
import os
import struct
import warnings
import zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

import massmerge
from massmerge.cli import predict as verb
from massmerge.io.rows import NamedInput
from models import family_bundle, image_bundle, text_bundle, with_options
from predict_command import rows, run


@pytest.fixture(scope="module")
def text(root):
    return str(text_bundle(root))


@pytest.fixture(scope="module")
def image(root):
    return str(image_bundle(root))


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


# Errors by row


def test_a_broken_image_is_an_error_of_its_row_and_the_others_go_on(image, here):
    picture(here / "a.png", 1)
    (here / "b.png").write_bytes(b"not a picture")
    picture(here / "c.png", 2)
    found = rows(image, "a.png", "b.png", "c.png", code=1)
    assert [r["task"] is None for r in found] == [False, True, False]
    assert "b.png: not a readable image" in found[1]["error"]
    assert [r["error"] for r in (found[0], found[2])] == [None, None]


def test_broken_rows_are_counted_at_the_end_with_exit_code_1(image, here):
    picture(here / "a.png")
    done = run(image, "a.png", "gone.png", "gone2.png")
    assert done.exit_code == 1
    assert "error: 2 of 3 inputs could not be answered; the others were." in done.stderr


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
    assert done.stdout.splitlines()[-1] == "error            t.csv: no column 'text'; available: 'body'."


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
    assert "there is no input to answer" in done.output


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
    assert "no task 'weather'. Choose from spam, topic, mood." in done.output


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


# Sessions


def test_rows_of_a_session_are_decided_together(text, tmp_path):
    table = tmp_path / "boxes.csv"
    table.write_text("box,body\n1,call now\n1,vote on the law\n,a quiet film\n")
    found = rows(text, table, "--column", "body", "--session", "box")
    model = massmerge.load(text)
    expected = model.predict(["call now", "vote on the law", "a quiet film"], session=["1", "1", None])
    assert [row["routing"]["residuals"] for row in found] == [pytest.approx(p.routing.residuals) for p in expected]
    assert found[0]["routing"]["residuals"] == found[1]["routing"]["residuals"] != found[2]["routing"]["residuals"]


@pytest.mark.parametrize(
    ("given", "message"),
    [(["call now"], "names a column"), (["{}", "--column", "body"], "no column 'nope'")],
)
def test_a_session_that_no_table_has_is_an_error(text, tmp_path, given, message):
    table = tmp_path / "mail.csv"
    table.write_text("body\ncall now\n")
    done = run(text, *(word.format(table) for word in given), "--session", "nope")
    assert done.exit_code in (1, 2) and message in done.output
