"""Where the rows of a suite come from."""

import io
import sys
import types

import numpy as np
import pytest
from PIL import Image

from massmerge import InputError, MassError, Suite
from massmerge.evaluation.data import read_task
from massmerge.evaluation.suite import SuiteTask
from tables import ROWS, png, read_rows, write_table


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_a_table_gives_inputs_and_labels_by_column(tmp_path, kind):
    write_table(tmp_path / f"t.{kind}", ROWS)
    inputs, labels = read_rows(tmp_path, data=f"t.{kind}", input="text")
    assert inputs == [f"text {i}" for i in range(6)]
    assert labels == ["x", "y", "x", "x", "y", "x"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_two_columns_are_pairs_of_texts(tmp_path, kind):
    write_table(tmp_path / f"t.{kind}", ROWS)
    inputs, _ = read_rows(tmp_path, data=f"t.{kind}", input=["text", "other"])
    assert inputs[1] == ("text 1", "more 1")


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
        name: read_rows(tmp_path, image=True, data=f"sub/{name}.parquet", input="image")[0]
        for name in ("bytes", "struct", "path")
    }
    assert found["bytes"][0].size == (4, 3)
    assert "not a readable image" in str(found["bytes"][1])
    assert "the image cell is empty" in str(found["bytes"][2])
    assert found["struct"][0].size == (4, 3)
    assert found["struct"][1] == found["path"][0] == tmp_path / "sub" / "p.png"
    assert "empty" in str(found["struct"][2]) and "empty" in str(found["path"][2])


def test_a_folder_of_images_by_class_gives_paths_and_the_names_of_their_folders(tmp_path):
    for name in ("x/1.png", "x/deep/2.JPG", "y/3.png", "y/notes.txt"):
        (tmp_path / "pictures" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pictures" / name).write_bytes(png())
    inputs, labels = read_rows(tmp_path, image=True, folder="pictures")
    assert [path.name for path in inputs] == ["1.png", "2.JPG", "3.png"]
    assert labels == ["x", "x", "y"]


def test_a_folder_of_texts_by_class_gives_them_whole(tmp_path):
    for name, text in {"x/a.txt": b"two\nlines", "y/b.md": b"one", "y/c.txt": b"\xff"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    inputs, labels = read_rows(tmp_path, folder=".")
    assert inputs[:2] == ["two\nlines", "one"]
    assert isinstance(inputs[2], InputError)
    assert labels == ["x", "y", "y"]


def test_a_file_that_lies_in_no_class_is_named(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "1.png").write_bytes(png())
    (tmp_path / "stray.png").write_bytes(png())
    with pytest.raises(InputError, match=r"stray\.png: is not in a class folder\. Move it to"):
        read_rows(tmp_path, image=True, folder=".")


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
    inputs, labels = read_rows(tmp_path, dataset="me/d@v2", config="small", input="text")
    assert inputs[:2] == ["first", "second"]
    assert "the text cell is empty" in str(inputs[2])
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
    turned, broken = read_rows(tmp_path, image=True, dataset="me/d", input="text", transposed=True)[0]
    assert (np.asarray(turned) == picture.T).all()
    assert "not a readable image" in str(broken)
    with pytest.raises(InputError, match="transposed belongs to dataset"):
        Suite.parse("tasks: {t: {folder: f, transposed: true}}")


def test_a_split_that_the_dataset_lacks_is_named(tmp_path, datasets):
    with pytest.raises(InputError, match=r"me/d \(split 'validation'\): not available from datasets \(Unknown split"):
        read_rows(tmp_path, dataset="me/d", input="text", options={"split": "validation"})


def test_a_dataset_that_was_saved_without_splits_gives_none_that_is_asked_for(tmp_path, datasets):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    datasets.load_from_disk = lambda path: datasets.load_dataset(path, None, split="test", revision=None)
    assert read_rows(tmp_path, dataset="saved", input="text")[1] == ["x", "y", "y"]
    with pytest.raises(
        InputError, match=r"the split 'validation' was requested, but this dataset was saved without splits"
    ):
        read_rows(tmp_path, dataset="saved", input="text", options={"split": "validation"})


def test_a_column_that_the_dataset_lacks_is_named(tmp_path, datasets):
    with pytest.raises(InputError, match=r"me/d \(test\): no column 'body'; available: 'text', 'label'"):
        read_rows(tmp_path, dataset="me/d", input="body")


def test_without_the_library_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MassError, match=r"pip install 'massmerge\[eval\]'"):
        read_rows(tmp_path, dataset="me/d", input="text")
