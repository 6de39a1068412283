"""Suites of the real `datasets` library, on files that lie here: pictures, class labels, Parquet, saved datasets."""

import io

import datasets
import numpy as np
import pytest
import yaml
from PIL import Image

import massmerge
from massmerge import InputError
from massmerge.evaluation.data import read_task
from massmerge.evaluation.suite import SuiteTask
from models import image_bundle
from tables import read_rows


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What the library makes of files is kept in the test's own folder; nothing is asked of a hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    datasets.disable_progress_bars()


def picture(shade: int, size: tuple[int, int] = (4, 3)) -> Image.Image:
    return Image.fromarray(np.full((size[1], size[0]), shade, np.uint8))


def labelled(kind: str = "text", names: tuple[str, ...] = ("x", "y")) -> datasets.Dataset:
    """Three rows whose labels are numbers of named classes."""
    feature = datasets.Value("string") if kind == "text" else datasets.Image()
    values = ["first", "second", None] if kind == "text" else [picture(0), picture(100), picture(200, (5, 2))]
    features = datasets.Features({kind: feature, "label": datasets.ClassLabel(names=list(names))})
    return datasets.Dataset.from_dict({kind: values, "label": [0, 1, 1]}, features=features)


def test_class_labels_of_a_saved_dataset_are_names_and_an_empty_cell_is_told(tmp_path):
    labelled().save_to_disk(tmp_path / "saved")
    inputs, labels = read_rows(tmp_path, dataset="saved", input="text")
    assert inputs[:2] == ["first", "second"] and labels == ["x", "y", "y"]
    assert "the text cell is empty" in str(inputs[2])


def test_a_saved_dataset_with_splits_gives_the_one_that_is_asked_for(tmp_path):
    whole = labelled()
    both = datasets.DatasetDict({"test": whole.select([0]), "validation": whole.select([1])})
    both.save_to_disk(tmp_path / "saved")
    assert read_rows(tmp_path, dataset="saved", input="text")[0] == ["first"]
    assert read_rows(tmp_path, dataset="saved", input="text", options={"split": "validation"})[0] == ["second"]
    with pytest.raises(InputError, match=r"saved \(split 'train'\): not available from datasets"):
        read_rows(tmp_path, dataset="saved", input="text", options={"split": "train"})


def test_parquet_files_of_a_folder_are_its_splits_with_pictures_and_class_labels(tmp_path):
    """As the hub stores most datasets: the class names stand in the file's own metadata."""
    (tmp_path / "d" / "data").mkdir(parents=True)
    for split, shade in (("train", 0), ("test", 100)):
        rows = labelled("image", ("cat", "dog"))
        rows = rows.map(lambda row, s=shade: {"image": picture(s), "label": row["label"]}, features=rows.features)
        rows.to_parquet(tmp_path / "d" / "data" / f"{split}-00000-of-00001.parquet")
    inputs, labels = read_rows(tmp_path, known=("cat", "dog"), image=True, dataset="d", input="image")
    assert labels == ["cat", "dog", "dog"]
    assert [int(np.asarray(image)[0, 0]) for image in inputs] == [100, 100, 100]


def test_a_folder_of_pictures_by_class_is_read_by_the_library_too(tmp_path):
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "d" / split / name).mkdir(parents=True)
            picture(7).save(tmp_path / "d" / split / name / "1.png")
    inputs, labels = read_rows(tmp_path, known=("cat", "dog"), image=True, dataset="d", input="image")
    assert labels == ["cat", "dog"]
    assert all(np.asarray(Image.open(path)).max() == 7 for path in inputs)


def test_a_list_of_labels_goes_by_number_whatever_the_dataset_calls_them(tmp_path):
    labelled().save_to_disk(tmp_path / "saved")
    task = SuiteTask(dataset="saved", input="text", labels=["a cat", "a dog"])
    assert read_task("t", task, tmp_path, ["a dog", "a cat"], image=False).labels == ["a cat", "a dog", "a dog"]


def test_pictures_that_are_stored_transposed_are_turned(tmp_path):
    grid = np.arange(6, dtype=np.uint8).reshape(2, 3)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x"])})
    rows = {"image": [Image.fromarray(grid)], "label": [0]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    turned = read_rows(tmp_path, ("x",), image=True, dataset="saved", input="image", transposed=True)[0][0]
    assert (np.asarray(turned) == grid.T).all()


def test_a_picture_that_is_broken_costs_its_row_alone(tmp_path):
    good = io.BytesIO()
    picture(9).save(good, "PNG")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x"])})
    cells = [{"bytes": good.getvalue(), "path": None}, {"bytes": b"no picture", "path": None}, None]
    rows = datasets.Dataset.from_dict({"image": cells, "label": [0, 0, 0]}, features=features)
    rows.save_to_disk(tmp_path / "saved")
    inputs = read_rows(tmp_path, ("x",), image=True, dataset="saved", input="image")[0]
    assert int(np.asarray(inputs[0])[0, 0]) == 9
    assert "not a readable image" in str(inputs[1]) and "empty" in str(inputs[2])


def test_missing_columns_configurations_and_ids_are_named(tmp_path):
    labelled().save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match=r"saved \(test\): no column 'body'; available: 'text', 'label'"):
        read_rows(tmp_path, dataset="saved", input="body")
    with pytest.raises(InputError, match=r"me/nothing \(split 'test'\): not available from datasets"):
        read_rows(tmp_path, dataset="me/nothing", input="text")


def test_a_bundle_is_measured_on_pictures_that_the_library_reads(root, tmp_path):
    bundle = image_bundle(root)
    model = massmerge.load(bundle)
    task = model.tasks[0]
    generator = np.random.default_rng(0)
    pictures = [Image.fromarray(generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)) for _ in range(4)]
    names = list(model.labels[task])
    known = [model.predict(one, task=task)[0].label for one in pictures]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = {"image": pictures, "label": [names.index(label) for label in known]}
    (tmp_path / "d").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "d" / "test.parquet")
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump({"tasks": {task: {"dataset": "d", "input": "image"}}}))
    found = massmerge.evaluate(bundle, tmp_path / "suite.yaml")
    assert found.tasks[0].known.value == 1 and found.tasks[0].rows == 4
