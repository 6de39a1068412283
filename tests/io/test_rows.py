"""Inputs as a command line names them: text, standard input, files, folders, tables."""

import errno
import io
import os
from pathlib import Path

import pytest
from PIL import Image

from massmerge import InputError
from massmerge.io.rows import read_inputs
from tables import write_table


def items(*given, image=False, **options):
    """What is read, errors as their words."""
    found = read_inputs(given, image=image, **options)
    return [(row.name, str(row.item) if isinstance(row.item, InputError) else row.item) for row in found]


# Text


def test_a_text_is_an_input_under_its_own_name(here):
    assert items("win a prize", "so sad") == [("win a prize", "win a prize"), ("so sad", "so sad")]


def test_a_long_text_has_a_short_name_and_is_no_path(here):
    ((name, item),) = items("word " * 2000)
    assert len(name) == 58
    assert item == "word " * 2000


def test_a_text_with_a_full_stop_is_no_path(here):
    assert items("see notes.txt for more")[0][1] == "see notes.txt for more"
    assert items("a good film.")[0][1] == "a good film."


def test_standard_input_gives_a_line_an_input(here):
    stdin = io.StringIO("first\n\nsecond\r\nthird")
    assert items("-", stdin=stdin) == [("-:1", "first"), ("-:3", "second"), ("-:4", "third")]


def test_a_text_file_gives_a_line_an_input(here):
    (here / "a.txt").write_text("first\n\nsecond\n")
    assert items("a.txt") == [("a.txt:1", "first"), ("a.txt:3", "second")]


def test_a_text_file_of_any_ending_is_read(here):
    (here / "notes").write_text("first\nsecond\n")
    assert items("notes") == [("notes:1", "first"), ("notes:2", "second")]


def test_a_text_file_that_is_not_utf_8_is_an_error_that_says_so(here):
    (here / "a.txt").write_bytes("café\n".encode("latin-1"))
    ((name, words),) = items("a.txt")
    assert name == "a.txt"
    assert words.startswith("a.txt: not UTF-8 text (")
    assert words.endswith("Save it as UTF-8.")


def test_a_text_file_of_no_bytes_is_an_error(here):
    (here / "a.txt").write_bytes(b"")
    assert items("a.txt") == [("a.txt", "a.txt: the file is empty.")]


@pytest.mark.parametrize("name", ["gone.txt", "gone.csv", "sub/gone.jsonl", "gone.parquet"])
def test_the_name_of_a_file_that_is_not_there_is_an_error_and_no_text(here, name):
    assert items(name) == [(name, f"{name}: no such file.")]


# What may not be read


def refused(path, *_, **__):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@pytest.fixture
def forbid(monkeypatch):
    """A function after which a file may not be read; tests may run as root, who may read all."""
    opened = Path.open
    return lambda name: monkeypatch.setattr(
        Path, "open", lambda path, *a, **k: (refused if path.name == name else opened)(path, *a, **k)
    )


@pytest.mark.parametrize("name", ["secret.txt", "secret", "secret.csv", "secret.tsv", "secret.jsonl"])
def test_a_file_that_may_not_be_read_is_an_error_and_the_others_go_on(here, forbid, name):
    (here / name).write_text("text\nfirst\n")
    forbid(name)
    assert items(name, "hello", column="text") == [
        (name, f"{name}: cannot be read (Permission denied)."),
        ("hello", "hello"),
    ]


def test_a_file_of_a_folder_that_may_not_be_read_is_an_error_in_its_place(here, forbid):
    (here / "texts").mkdir()
    (here / "texts" / "open.txt").write_text("first")
    (here / "texts" / "secret.txt").write_text("second")
    forbid("secret.txt")
    assert items("texts") == [
        ("texts/open.txt", "first"),
        ("texts/secret.txt", "texts/secret.txt: cannot be read (Permission denied)."),
    ]


def test_a_folder_that_may_not_be_entered_gives_errors_for_its_files(here, monkeypatch):
    (here / "texts").mkdir()
    (here / "texts" / "a.txt").write_text("first")
    monkeypatch.setattr(Path, "is_file", refused)
    monkeypatch.setattr(Path, "open", refused)
    assert items("texts") == [("texts/a.txt", "texts/a.txt: cannot be read (Permission denied).")]


def test_standard_input_that_cannot_be_read_is_an_error(here):
    def closed():
        yield "first\n"
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert items("-", stdin=closed()) == [("-:1", "first"), ("-", "-: cannot be read (Input/output error).")]


# Folders


def test_a_folder_of_texts_gives_a_file_an_input_sorted_and_below_it_too(here):
    (here / "texts" / "sub").mkdir(parents=True)
    (here / "texts" / "b.txt").write_text("two\nlines")
    (here / "texts" / "sub" / "a.md").write_text("below")
    (here / "texts" / "c.bin").write_text("no text")
    assert items("texts") == [("texts/b.txt", "two\nlines"), ("texts/sub/a.md", "below")]


def test_a_file_of_a_folder_that_is_not_utf_8_is_an_error_in_its_place(here):
    (here / "texts").mkdir()
    (here / "texts" / "a.txt").write_bytes(b"\xff\xfe")
    (here / "texts" / "b.txt").write_text("good")
    found = items("texts")
    assert "texts/a.txt: not UTF-8 text" in found[0][1]
    assert found[1] == ("texts/b.txt", "good")


def test_a_folder_of_images_gives_their_paths(here):
    (here / "pictures").mkdir()
    for name in ("b.JPG", "a.png", "notes.txt"):
        (here / "pictures" / name).write_bytes(b"x")
    assert [str(item) for _, item in items("pictures", image=True)] == ["pictures/a.png", "pictures/b.JPG"]


@pytest.mark.parametrize(("image", "kind"), [(True, "images"), (False, "texts")])
def test_a_folder_with_nothing_to_read_is_an_error(here, image, kind):
    (here / "empty").mkdir()
    assert f"empty: no {kind} in it (" in items("empty", image=image)[0][1]


# Images


def test_an_image_file_is_an_input(here):
    (here / "a.png").write_bytes(b"x")
    assert [(name, str(item)) for name, item in items("a.png", image=True)] == [("a.png", "a.png")]


def test_an_image_file_that_is_missing_or_empty_is_an_error(here):
    (here / "empty.png").write_bytes(b"")
    assert items("gone.png", "empty.png", image=True) == [
        ("gone.png", "gone.png: no such file."),
        ("empty.png", "empty.png: the file is empty."),
    ]


# Tables


KINDS = ["csv", "tsv", "jsonl", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_gives_a_row_an_input_from_the_column_that_is_named(here, kind):
    write_table(here / f"t.{kind}", [{"id": "1", "text": "first"}, {"id": "2", "text": "second"}])
    assert items(f"t.{kind}", column="text") == [(f"t.{kind}:1", "first"), (f"t.{kind}:2", "second")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_a_value_is_an_error_in_its_place(here, kind):
    write_table(
        here / f"t.{kind}", [{"id": "1", "text": "first"}, {"id": "2", "text": None}, {"id": "3", "text": "third"}]
    )
    found = dict(items(f"t.{kind}", column="text"))
    assert found[f"t.{kind}:3"] == "third"
    assert found[f"t.{kind}:2"] == f"t.{kind}:2: the column 'text' is empty."


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_that_is_not_there_is_an_error_with_those_there_are(here, kind):
    write_table(here / f"t.{kind}", [{"id": "1", "body": "first"}])
    where = "t.jsonl:1" if kind == "jsonl" else f"t.{kind}"  # lines of JSON may have different columns
    assert items(f"t.{kind}", column="text") == [(where, f"{where}: no column 'text'; available: 'id', 'body'.")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_without_a_named_column_is_an_error_that_says_what_to_give(here, kind):
    write_table(here / f"t.{kind}", [{"text": "first"}])
    assert "name the column that holds the inputs: --column NAME" in items(f"t.{kind}")[0][1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_no_bytes_is_an_error(here, kind):
    (here / f"t.{kind}").write_bytes(b"")
    assert items(f"t.{kind}", column="text") == [(f"t.{kind}", f"t.{kind}: the file is empty.")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_other_bytes_is_an_error(here, kind):
    (here / f"t.{kind}").write_bytes(b"text\n\xff\xfe\xff\n")
    assert any("t." + kind + ":" in item and "text" not in name for name, item in items(f"t.{kind}", column="text"))


def test_pictures_in_a_table_are_relative_to_it(here):
    (here / "data").mkdir()
    write_table(here / "data" / "t.csv", [{"file": "a.png"}])
    assert [str(item) for _, item in items("data/t.csv", image=True, column="file")] == ["data/a.png"]


@pytest.mark.parametrize("as_struct", [False, True], ids=["bytes", "struct"])
def test_pictures_in_a_table_may_be_bytes_or_what_datasets_writes(here, as_struct):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), "red").save(buffer, "PNG")
    cells = [buffer.getvalue(), b"no picture"]
    rows = [{"image": {"bytes": cell, "path": None} if as_struct else cell} for cell in cells]
    write_table(here / "t.parquet", rows)
    found = items("t.parquet", image=True, column="image")
    assert found[0][1].size == (4, 3)
    assert found[1][1] == "not a readable image (cannot identify image file these bytes)."


def test_a_struct_without_bytes_is_a_path_relative_to_the_table(here):
    write_table(
        here / "t.parquet", [{"image": {"bytes": None, "path": "a.png"}}, {"image": {"bytes": b"", "path": None}}]
    )
    found = items("t.parquet", image=True, column="image")
    assert str(found[0][1]) == "a.png"
    assert found[1][1] == "contains neither an image nor a path."


def test_a_broken_line_of_json_is_an_error_and_the_others_go_on(here):
    (here / "t.jsonl").write_text('{"text": "first"}\n{"text": \n\n[1]\n{"text": "last"}\n')
    found = items("t.jsonl", column="text")
    assert found[0][1] == "first"
    assert found[1] == ("t.jsonl:2", "t.jsonl:2: not valid JSON (Expecting value, column 10).")
    assert "no column 'text'; available: none" in found[2][1]
    assert found[3][1] == "last"


def test_a_line_of_json_is_named_by_its_number_in_the_file(here):
    (here / "t.jsonl").write_text('\n{"text": "first"}\n\n{"text": "second"}\n')
    assert items("t.jsonl", column="text") == [("t.jsonl:2", "first"), ("t.jsonl:4", "second")]


@pytest.mark.parametrize("value", ["[" * 100_000, "1" * 5000], ids=["nested brackets", "a number of 5000 digits"])
def test_a_line_of_json_that_the_parser_cannot_hold_is_an_error_and_the_others_go_on(here, value):
    (here / "t.jsonl").write_text(f'{{"text": {value}}}\n{{"text": "last"}}\n')
    found = items("t.jsonl", column="text")
    assert found[0][1].startswith("t.jsonl:1: not valid JSON (")
    assert found[1] == ("t.jsonl:2", "last")


def test_a_table_with_a_byte_order_mark_is_read(here):
    (here / "t.csv").write_bytes("\ufefftext\nfirst\n".encode())
    assert items("t.csv", column="text")[0][1] == "first"


def test_a_csv_cell_may_hold_commas_lines_and_very_long_text(here):
    long = "word " * 60_000
    (here / "t.csv").write_text(f'id,text\n1,"one, two\nthree"\n2,{long}\n3,last\n')
    assert [item for _, item in items("t.csv", column="text")] == ["one, two\nthree", long, "last"]


def test_numbers_in_a_column_are_read_as_text(here):
    write_table(here / "t.jsonl", [{"text": 7}])
    assert items("t.jsonl", column="text")[0][1] == "7"


# Streams


def test_inputs_are_read_one_by_one(here):
    lines = iter(["first\n", "second\n"])
    rows = read_inputs(["-"], image=False, stdin=lines)
    next(rows)
    assert next(lines) == "second\n"


def test_a_large_table_is_not_read_at_once(here):
    write_table(here / "t.csv", [{"text": f"row {i}"} for i in range(50_000)])
    rows = read_inputs(["t.csv"], image=False, column="text")
    assert next(rows).item == "row 0"
    rows.close()


@pytest.mark.parametrize("argument", ["", "   "])
def test_an_empty_argument_is_an_empty_text_and_not_the_current_folder(argument):
    (row,) = read_inputs([argument], image=False)
    assert "empty text" in str(row.item)
