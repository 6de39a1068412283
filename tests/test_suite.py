"""Suites: the YAML, where rows come from, which of them are taken, and what is refused before anything runs."""

import io
import itertools
import json
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from massmerge import InputError, MassError, Suite
from massmerge.evaluation.data import batches_of_one_task, read_suite, read_task, stream_order
from massmerge.evaluation.sources import open_source
from massmerge.evaluation.spool import Spool
from massmerge.evaluation.suite import SuiteTask, label_text, suite_and_folder

SMALL = "tasks:\n  one: {data: a.csv, input: text}\n"


def fault(text: str) -> str:
    with pytest.raises(InputError) as caught:
        Suite.parse(text, "suite.yaml")
    return str(caught.value)


# The YAML


def test_a_task_needs_data_and_the_column_of_its_inputs():
    task = Suite.parse(SMALL).tasks["one"]
    assert (task.data, task.columns, task.label_column, task.metric, task.reference) == (
        "a.csv", ["text"], "label", "accuracy", None,
    )  # fmt: skip


def test_a_suite_is_called_after_its_file_unless_it_has_a_name(tmp_path):
    (tmp_path / "mail.yaml").write_text(SMALL)
    assert Suite.load(tmp_path / "mail.yaml").name == "mail"
    (tmp_path / "mail.yaml").write_text("name: post\n" + SMALL)
    assert Suite.load(tmp_path / "mail.yaml").name == "post"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL + "extra: 1", "suite.yaml:3: unknown key 'extra' (known here: tasks, name, shared_labels, generate)"),
        (
            "tasks:\n  one:\n    data: a.csv\n    inputs: x",
            "suite.yaml:4: unknown key 'tasks.one.inputs' (known here: data",
        ),
        ("tasks:\n  one: {input: text}", "suite.yaml:2: 'tasks.one': give one of data (a table), folder"),
        ("tasks:\n  one: {data: a.csv, folder: b, input: text}", "give one of data (a table), folder"),
        ("tasks:\n  one: {data: a.csv}", "suite.yaml:2: 'tasks.one': input is missing"),
        ("tasks:\n  one: {data: a.csv, input: [a, b, c]}", "input is one column, or two of them"),
        ("tasks:\n  one: {folder: a, input: x}", "a folder has no columns"),
        (
            "tasks:\n  one: {data: a.csv, input: x, split: test}",
            "split belongs to dataset; for a table or a folder write",
        ),
        (
            "tasks:\n  one: {data: a.csv, input: x, metric: auc}",
            "should be 'accuracy', 'f1' or 'spearman' (it is 'auc')",
        ),
        ("tasks:\n  one: {data: a.csv, input: x, reference: 97.5}", "less than or equal to 1"),
        ("tasks:\n  one: {data: a.csv, input: x, reference: 0}", "greater than 0"),
        ("tasks:\n  one: {data: a.csv, input: x, positive: a}", "positive belongs to metric: f1"),
        (SMALL + "shared_labels: [[one, two/a]]", "'one' in shared_labels: write task/label"),
        (SMALL + "  one: {data: b.csv, input: text}", "suite.yaml:3: the key 'one' stands there twice"),
        ("tasks: {}", "suite.yaml:1: 'tasks' is empty; name at least one"),
        ("name: x", "'tasks' is missing"),
        ("tasks:\n  one: {data: a/{split}.csv, input: x}", "suite.yaml:2: not valid YAML"),
        ("- a", "a suite is a mapping with the key tasks"),
    ],
)
def test_a_fault_is_told_with_its_line_and_what_would_be_right(text, message):
    assert message in fault(text)


def test_all_faults_are_told_at_once():
    text = "tasks:\n  one: {data: 3, input: x}\n  two: {data: a.csv, input: x, metric: auc}\nnmae: y"
    assert [line.split(":")[1] for line in fault(text).splitlines()] == ["2", "3", "4"]


def test_a_suite_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.yaml: no such suite"):
        Suite.load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("value", "text"), [(3, "3"), (3.0, "3"), ("3", "3"), (True, "true"), (None, ""), (0.5, "0.5"), ("True", "True")]
)
def test_a_label_is_the_same_however_a_file_holds_it(value, text):
    assert label_text(value) == text


def test_labels_are_mapped_by_a_mapping_or_by_their_number():
    mapped = Suite.parse("tasks: {a: {data: a.csv, input: x, labels: {0: no, 1: yes, good: fine}}}").tasks["a"]
    assert [mapped.head_label(v) for v in (0, "1", "good", "other")] == ["false", "true", "fine", "other"]
    numbered = Suite.parse("tasks: {a: {data: a.csv, input: x, labels: [ham, spam]}}").tasks["a"]
    assert [numbered.head_label(v) for v in (0, "1", 1.0, 2, "spam")] == ["ham", "spam", "spam", "2", "spam"]


# Splits and references


def test_the_split_takes_its_place_in_the_path():
    task = SuiteTask(data="a/{split}.csv", input="x")
    assert (task.place(None), task.place("validation")) == ("a/test.csv", "a/validation.csv")


def test_a_split_that_nothing_can_be_chosen_by_is_refused():
    with pytest.raises(InputError, match=r"the split 'validation' was asked for, but this names one file"):
        SuiteTask(data="a.csv", input="x").place("validation")
    with pytest.raises(InputError, match=r"the suite says split: test"):
        SuiteTask(dataset="me/d", split="test", input="x").place("validation")


def test_a_reference_is_of_the_test_split_unless_it_is_given_for_each():
    one = SuiteTask(data="a", input="x", reference=0.9)
    each = SuiteTask(data="a", input="x", reference={"validation": 0.8, "test": 0.9})
    assert [one.reference_of(s) for s in (None, "test", "validation")] == [0.9, 0.9, None]
    assert [each.reference_of(s) for s in (None, "test", "validation", "train")] == [0.9, 0.9, 0.8, None]


# Where rows come from

ROWS = [{"text": f"text {i}", "other": f"more {i}", "label": "xyx"[i % 3]} for i in range(6)]


def write_table(path, rows):
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        mark = "\t" if path.suffix == ".tsv" else ","
        lines = [list(rows[0]), *(["" if v is None else str(v) for v in row.values()] for row in rows)]
        path.write_text("".join(mark.join(line) + "\n" for line in lines))
    return path


def read(place, known=("x", "y"), image=False, task="a", options=None, **more):
    """The rows of one task: their inputs and labels."""
    data = read_task(task, SuiteTask(**more), place, known, image=image, **(options or {}))
    data.read_inputs()
    return [data.inputs[i] for i in range(len(data))], data.labels


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_a_table_gives_inputs_and_labels_by_column(tmp_path, kind):
    write_table(tmp_path / f"t.{kind}", ROWS)
    inputs, labels = read(tmp_path, data=f"t.{kind}", input="text")
    assert inputs == [f"text {i}" for i in range(6)]
    assert labels == ["x", "y", "x", "x", "y", "x"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_two_columns_are_pairs_of_texts(tmp_path, kind):
    write_table(tmp_path / f"t.{kind}", ROWS)
    inputs, _ = read(tmp_path, data=f"t.{kind}", input=["text", "other"])
    assert inputs[1] == ("text 1", "more 1")


def png(size=(4, 3)):
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, "PNG")
    return buffer.getvalue()


def test_pictures_of_a_table_are_bytes_or_structs_or_paths_relative_to_it(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "p.png").write_bytes(png((5, 5)))
    for name, cells in {
        "bytes": [png(), b"broken", None],
        "struct": [{"bytes": png(), "path": None}, {"bytes": None, "path": "p.png"}, {"bytes": None, "path": None}],
        "path": ["p.png", "gone.png", ""],
    }.items():
        write_table(tmp_path / "sub" / f"{name}.parquet", [{"image": c, "label": "x"} for c in cells])
    found = {
        name: read(tmp_path, image=True, data=f"sub/{name}.parquet", input="image")[0]
        for name in ("bytes", "struct", "path")
    }
    assert found["bytes"][0].size == (4, 3)
    assert "not an image that can be read" in str(found["bytes"][1])
    assert "the cell of the picture is empty" in str(found["bytes"][2])
    assert found["struct"][0].size == (4, 3)
    assert found["struct"][1] == found["path"][0] == tmp_path / "sub" / "p.png"
    assert "empty" in str(found["struct"][2]) and "empty" in str(found["path"][2])


def test_a_folder_of_images_by_class_gives_paths_and_the_names_of_their_folders(tmp_path):
    for name in ("x/1.png", "x/deep/2.JPG", "y/3.png", "y/notes.txt"):
        (tmp_path / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pictures" / name).write_bytes(png())
    inputs, labels = read(tmp_path, image=True, folder="pictures")
    assert [path.name for path in inputs] == ["1.png", "2.JPG", "3.png"]
    assert labels == ["x", "x", "y"]


def test_a_folder_of_texts_by_class_gives_them_whole(tmp_path):
    for name, text in {"x/a.txt": b"two\nlines", "y/b.md": b"one", "y/c.txt": b"\xff"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    inputs, labels = read(tmp_path, folder=".")
    assert inputs[:2] == ["two\nlines", "one"]
    assert isinstance(inputs[2], InputError)
    assert labels == ["x", "y", "y"]


def test_a_file_that_lies_in_no_class_is_named(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "1.png").write_bytes(png())
    (tmp_path / "stray.png").write_bytes(png())
    with pytest.raises(InputError, match=r"stray\.png: lies in no class\. Put it into the folder of its class"):
        read(tmp_path, image=True, folder=".")


class FakeRows(list):
    """As much of a dataset as is used."""

    features: dict
    column_names: list

    def select_columns(self, names):
        return self.but([{name: row[name] for name in names} for row in self])

    def select(self, places):
        return self.but([self[i] for i in places])

    def cast_column(self, name, kind):
        return self.but(self, {**self.features, name: kind})

    def but(self, rows, features=None):
        new = FakeRows(rows)
        new.features, new.column_names = features or self.features, self.column_names
        return new


@pytest.fixture
def datasets(monkeypatch):
    """The library `datasets`, with one dataset that has a column of class labels; says what was asked for."""
    library = types.ModuleType("datasets")
    library.asked = []
    library.Image = type("Image", (), {"__init__": lambda self, decode=True: None})
    rows = FakeRows([{"text": "first", "label": 0}, {"text": "second", "label": 1}, {"text": None, "label": 1}])
    rows.column_names = ["text", "label"]
    rows.features = {"text": None, "label": types.SimpleNamespace(names=["x", "y"])}

    def load_dataset(name, config, *, split, revision):
        library.asked.append((name, config, split, revision))
        if split != "test":
            raise ValueError(f'Unknown split "{split}". Should be one of ["test"].\nmore')
        return rows

    library.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    return library


def test_an_id_of_datasets_gives_the_names_of_its_class_labels(tmp_path, datasets):
    inputs, labels = read(tmp_path, dataset="me/d@v2", config="small", input="text")
    assert inputs[:2] == ["first", "second"]
    assert "the cell of the text is empty" in str(inputs[2])
    assert labels == ["x", "y", "y"]
    assert datasets.asked == [("me/d", "small", "test", "v2")]


def test_a_file_of_labels_names_the_numbers_of_a_dataset_whatever_it_calls_them(tmp_path, datasets):
    (tmp_path / "names.txt").write_text("a cat\na dog\n")
    known = ["a dog", "a cat"]
    task = SuiteTask(dataset="me/d", input="text", labels="names.txt")
    assert read_task("t", task, tmp_path, known, image=False).labels == ["a cat", "a dog", "a dog"]
    with pytest.raises(InputError, match=r"absent\.txt: cannot be read as labels"):
        read_task("t", task.model_copy(update={"labels": "absent.txt"}), tmp_path, known, image=False)


def test_pictures_that_are_stored_transposed_are_turned(tmp_path, datasets):
    content = io.BytesIO()
    picture = np.arange(6, dtype=np.uint8).reshape(2, 3)
    Image.fromarray(picture).save(content, "PNG")
    rows = datasets.load_dataset("me/d", None, split="test", revision=None)
    rows[:] = [{"text": {"bytes": content.getvalue()}, "label": 0}, {"text": {"bytes": b"no picture"}, "label": 1}]
    turned, broken = read(tmp_path, image=True, dataset="me/d", input="text", transposed=True)[0]
    assert (np.asarray(turned) == picture.T).all()
    assert "cannot be read as a picture" in str(broken)
    with pytest.raises(InputError, match="transposed belongs to dataset"):
        Suite.parse("tasks: {t: {folder: f, transposed: true}}")


def test_a_split_that_the_dataset_lacks_is_named(tmp_path, datasets):
    with pytest.raises(InputError, match=r"me/d \(split 'validation'\): not to be had from datasets \(Unknown split"):
        read(tmp_path, dataset="me/d", input="text", options={"split": "validation"})


def test_a_dataset_that_was_saved_without_splits_gives_none_that_is_asked_for(tmp_path, datasets):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    datasets.load_from_disk = lambda path: datasets.load_dataset(path, None, split="test", revision=None)
    assert read(tmp_path, dataset="saved", input="text")[1] == ["x", "y", "y"]
    with pytest.raises(
        InputError, match=r"the split 'validation' was asked for, but this dataset was saved without splits"
    ):
        read(tmp_path, dataset="saved", input="text", options={"split": "validation"})


def test_a_column_that_the_dataset_lacks_is_named(tmp_path, datasets):
    with pytest.raises(InputError, match=r"me/d \(test\): no column 'body'; there are 'text', 'label'"):
        read(tmp_path, dataset="me/d", input="body")


def test_without_the_library_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MassError, match=r"pip install 'massmerge\[eval\]'"):
        read(tmp_path, dataset="me/d", input="text")


# What is refused


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("column", ["input", "label"])
def test_a_column_that_is_missing_is_an_error_with_those_there_are(tmp_path, kind, column):
    write_table(tmp_path / f"t.{kind}", ROWS)
    with pytest.raises(InputError, match="no column 'body'; there are 'text', 'other', 'label'"):
        read(tmp_path, data=f"t.{kind}", **{"input": "text", column: "body"})


def test_a_file_that_is_missing_is_an_error_with_those_beside_it(tmp_path):
    write_table(tmp_path / "test.csv", ROWS)
    with pytest.raises(InputError, match=r"validation\.csv: no such file\. Its folder holds test\.csv\."):
        read(tmp_path, data="{split}.csv", input="text", options={"split": "validation"})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"folder": "gone"}, r"gone: no such folder"),
        ({"folder": "empty"}, r"empty: no files by class in it\. Make a folder for each class"),
        ({"data": "t.xlsx", "input": "a"}, r"a table is a file that ends in \.csv, \.jsonl, \.parquet, \.tsv"),
        ({"data": "none.csv", "input": "text"}, r"none\.csv: has no rows\. A task needs at least one\."),
        ({"data": "hole.csv", "input": "text"}, r"hole\.csv:2: has no label \(1 of 3 rows\)\. Fill it in, or remove"),
        ({"data": "bad.jsonl", "input": "text"}, r"row 2 of .*bad\.jsonl: not valid JSON"),
    ],
)
def test_what_cannot_be_measured_is_told_with_its_place_and_what_to_do(tmp_path, more, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.xlsx").write_bytes(b"x")
    (tmp_path / "none.csv").write_text("text,label\n")
    (tmp_path / "hole.csv").write_text("text,label\na,x\nb,\nc,y\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a", "label": "x"}\n{"text":\n')
    with pytest.raises(InputError, match=message):
        read(tmp_path, **more)


def test_a_label_that_the_head_does_not_know_is_an_error_that_lists_both_sides(tmp_path):
    write_table(tmp_path / "t.csv", [{"text": "a", "label": "pos"}, {"text": "b", "label": "x"}])
    with pytest.raises(InputError) as caught:
        read(tmp_path, data="t.csv", input="text")
    words = str(caught.value)
    assert "the head does not know 1 of the data's labels, such as 'pos'" in words
    assert "labels in the data: pos, x" in words
    assert "labels of the head: x, y" in words
    assert "`labels: {label in the data: label of the head}`" in words


def test_labels_outside_of_a_small_sample_are_refused_too(tmp_path):
    write_table(tmp_path / "t.csv", [{"text": str(i), "label": "x" if i < 50 else "strange"} for i in range(51)])
    for seed in range(5):
        with pytest.raises(InputError, match="does not know 1 of the data's labels"):
            read(tmp_path, data="t.csv", input="text", options={"limit": 1, "seed": seed})


@pytest.mark.parametrize(
    "more", [{"labels": {"x": "typo"}}, {"labels": ["x", "typo"]}, {"metric": "f1", "positive": "typo"}]
)
def test_a_label_in_the_suite_that_the_head_does_not_have_is_refused(tmp_path, more):
    write_table(tmp_path / "t.csv", [{"text": "a", "label": "y"}])
    with pytest.raises(
        InputError, match=r"the suite names labels that the head does not have: typo\.\n  labels of the"
    ):
        read(tmp_path, data="t.csv", input="text", **more)


def test_spearman_needs_numbers_and_a_head_with_one_output(tmp_path):
    write_table(tmp_path / "t.csv", [{"text": "a", "label": "1.5"}, {"text": "b", "label": "much"}])
    more = {"data": "t.csv", "input": "text", "metric": "spearman"}
    with pytest.raises(InputError, match="is for heads with one output; this one has 2: x, y"):
        read(tmp_path, **more)
    with pytest.raises(InputError, match=r"t\.csv:2: 'much' is no number"):
        read(tmp_path, ("LABEL_0",), **more)


def test_a_task_that_the_bundle_lacks_is_refused_before_its_data_is_looked_for(tmp_path):
    suite = Suite.parse("tasks: {a: {data: gone.csv, input: x}, b: {data: gone.csv, input: x}}")
    with pytest.raises(InputError, match=r"the bundle has no task 'b' with labels; there are a, c\."):
        read_suite(suite, tmp_path, {"a": ("x",), "c": ("x",)}, image=False)


def test_what_is_wrong_with_several_tasks_is_told_at_once(tmp_path):
    suite = Suite.parse("tasks: {a: {data: gone.csv, input: x}, b: {folder: nowhere}}")
    with pytest.raises(InputError) as caught:
        read_suite(suite, tmp_path, {"a": ("x",), "b": ("x",)}, image=False)
    assert "task a: " in str(caught.value) and "task b: " in str(caught.value)


def test_tasks_can_be_chosen_by_name():
    suite = Suite.parse("tasks: {a: {data: x, input: x}, b: {data: x, input: x}}")
    assert list(suite.only(["b"]).tasks) == ["b"]
    assert suite.only([]) == suite
    with pytest.raises(InputError, match=r"no task 'c' in the suite\. There are a, b\."):
        suite.only(["c"])


# Which rows are taken


def sample(tmp_path, limit, seed=0, task="a"):
    if not (tmp_path / "t.csv").exists():
        write_table(tmp_path / "t.csv", [{"text": str(i), "label": "x"} for i in range(100)])
    data = read_task(task, SuiteTask(data="t.csv", input="text"), tmp_path, ["x"], image=False, limit=limit, seed=seed)
    data.read_inputs()
    assert [data.inputs[i] for i in range(len(data))] == [str(row) for row in data.rows]
    return data.rows


def test_a_limit_draws_rows_by_its_seed(tmp_path):
    assert sample(tmp_path, 10) == sample(tmp_path, 10)
    assert sample(tmp_path, 10) != sample(tmp_path, 10, seed=1)
    assert sample(tmp_path, 10) != sample(tmp_path, 10, task="b")
    assert len(set(sample(tmp_path, 10))) == 10
    assert sample(tmp_path, 500) == list(range(100))


def test_a_smaller_limit_takes_some_of_the_rows_of_a_larger_one(tmp_path):
    assert set(sample(tmp_path, 10)) < set(sample(tmp_path, 40))


def test_names_of_rows_say_where_they_lie(tmp_path):
    write_table(tmp_path / "t.csv", ROWS)
    source = open_source(SuiteTask(data="t.csv", input="text"), tmp_path, None, image=False)
    assert source.row_name(0) == f"{tmp_path / 't.csv'}:1"


# The stream


def test_the_stream_holds_every_row_once_in_an_order_of_its_seed():
    counts = {"a": 40, "b": 3, "c": 17}
    order = stream_order(counts, 0)
    assert sorted(order) == sorted((task, i) for task, n in counts.items() for i in range(n))
    assert order == stream_order(counts, 0)
    assert order != stream_order(counts, 1)
    assert order != sorted(order)


def test_tasks_are_spread_over_the_whole_stream():
    order = [task for task, _ in stream_order({"a": 300, "b": 300}, 0)]
    halves = [order[:300].count("a"), order[300:].count("a")]
    assert min(halves) > 120
    changes = sum(x != y for x, y in itertools.pairwise(order))
    assert changes > 240


def test_batches_of_one_task_hold_every_row_once_and_are_shuffled():
    counts = {"a": 40, "b": 3, "c": 17}
    batches = batches_of_one_task(counts, 8, 0)
    assert sorted(pair for batch in batches for pair in batch) == sorted(stream_order(counts, 0))
    assert all(len({task for task, _ in batch}) == 1 and len(batch) <= 8 for batch in batches)
    assert [batch[0][0] for batch in batches] != sorted(batch[0][0] for batch in batches)
    assert all(batch != sorted(batch) for batch in batches if len(batch) == 8)


# The spool


def test_inputs_come_back_from_disk_as_they_went_in_any_order(tmp_path):
    items = ["text", ("a", "b"), tmp_path / "p.png", InputError("broken"), "línea\n", "\ud800", ""]
    spool = Spool()
    for item in items:
        spool.add(item)
    for i in np.random.default_rng(0).permutation(len(items)):
        found = spool[int(i)]
        if isinstance(items[i], InputError):
            assert isinstance(found, InputError) and str(found) == "broken"
        else:
            assert found == items[i] and type(found) is type(items[i])
    spool.add(png())
    assert spool[len(items)].size == (4, 3)
    assert len(spool) == len(items) + 1


def test_the_checksum_of_rows_changes_with_inputs_labels_and_files(tmp_path):
    def checksum(rows, **more):
        write_table(tmp_path / "t.csv", rows)
        data = read_task("a", SuiteTask(data="t.csv", input="text"), tmp_path, ["x", "y"], **{"image": False, **more})
        data.read_inputs()
        return data.sha256()

    rows = [{"text": "a.png", "label": "x"}, {"text": "b", "label": "y"}]
    first = checksum(rows)
    assert first == checksum(rows)
    assert first != checksum([{**rows[0], "label": "y"}, rows[1]])
    assert first != checksum([{**rows[0], "text": "c"}, rows[1]])
    (tmp_path / "a.png").write_bytes(png())
    before = checksum(rows, image=True)
    (tmp_path / "a.png").write_bytes(png((9, 9)))
    assert checksum(rows, image=True) != before


def test_a_suite_given_as_a_path_starts_from_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("sub/s.yaml").write_text(SMALL)
    assert suite_and_folder("sub/s.yaml")[1] == tmp_path.resolve() / "sub"
    assert suite_and_folder("sub/s.yaml", "other")[1] == Path("other")
    assert suite_and_folder(Suite.parse(SMALL))[1] == Path(".")
