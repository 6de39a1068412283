"""The example of published experts, as far as it goes without its downloads."""

import importlib.util
import sys
from pathlib import Path

import pytest

from massmerge.recipe import FileHead, Recipe

FOLDER = Path(__file__).parents[2] / "examples" / "third_party"


@pytest.fixture
def measure(monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(str(FOLDER))  # it takes functions from the script beside it
    spec = importlib.util.spec_from_file_location("third_party_measure", FOLDER / "measure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("fetch", None)


def test_the_recipe_names_a_head_for_every_task():
    heads = {task.name: task.head for task in Recipe.load(FOLDER / "recipe.yaml").tasks}
    assert all(isinstance(head, FileHead) for head in heads.values())
    assert len(heads["filters"].labels) == 13
    assert (heads["injection"].layers, heads["injection"].activation) == (["classifier.0", "classifier.3"], "relu")
    assert heads["sre"].features == "auto"  # its modules.json says what it reads
    assert len(set((FOLDER / "terms.txt").read_text().splitlines())) == 30


@pytest.mark.parametrize("task", ["filters", "injection", "sre"])
def test_texts_that_calibrate_are_not_those_that_measure(measure, task):
    given, measured = measure.texts_of(task)
    assert (len(given), len(measured)) == (16, 29)
    assert not set(given) & set(measured)
