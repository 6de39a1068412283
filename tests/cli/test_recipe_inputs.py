"""`tasks.inputs` of a recipe: a merge calibrates at once, and an addition calibrates again."""

import json

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from massmerge.bundle.reader import Bundle
from massmerge.cli.main import main
from models import image_bundle, text_bundle

TEXTS = {"spam": "win a prize\ncall now\n", "topic": "the team won\nvote law\n", "mood": "so sad\nhappy song\n"}


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def write_recipe(bundle, folder, tasks, paths):
    """The recipe of a bundle with some of its tasks, which have these inputs; sources are named by absolute paths."""
    data = yaml.safe_load(Bundle(bundle).recipe.dump())
    home = bundle.parent
    data["base"] = str(home / data["base"])
    data["tasks"] = [
        {**task, "expert": str(home / task["expert"])}
        | ({"inputs": paths[task["name"]]} if task["name"] in paths else {})
        for task in data["tasks"]
        if task["name"] in tasks
    ]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data))
    return folder / "recipe.yaml", data


@pytest.fixture
def texts(tmp_path):
    for task, lines in TEXTS.items():
        (tmp_path / f"{task}.txt").write_text(lines)
    return {task: f"{task}.txt" for task in TEXTS}


def test_a_merge_calibrates_on_the_inputs_of_its_recipe(root, tmp_path, texts):
    recipe, _ = write_recipe(text_bundle(root), tmp_path, TEXTS, texts)
    done = run("merge", recipe, tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["calibration"]
    assert found["inputs"] == dict.fromkeys(TEXTS, 2)
    assert Bundle(tmp_path / "out").router_kind == found["kind"]


def test_a_merge_of_images_does_so_too(root, tmp_path):
    for task in "ab":
        (tmp_path / task).mkdir()
        for i in range(2):
            pixels = np.random.default_rng(i).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / task / f"{i}.png")
    recipe, _ = write_recipe(image_bundle(root), tmp_path, "ab", {"a": "a", "b": "b"})
    done = run("merge", recipe, tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["calibration"]["inputs"] == {"a": 2, "b": 2}


def test_a_plan_names_inputs_that_are_not_there(root, tmp_path, texts):
    recipe, _ = write_recipe(text_bundle(root), tmp_path, TEXTS, {**texts, "mood": "gone.txt"})
    done = run("plan", recipe)
    assert done.exit_code == 2
    assert "task mood: inputs: gone.txt: no such file or folder." in done.stderr


def test_inputs_of_some_tasks_alone_are_told_and_not_used(root, tmp_path, texts):
    recipe, _ = write_recipe(text_bundle(root), tmp_path, TEXTS, {"spam": texts["spam"]})
    done = run("merge", recipe, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "topic, mood: no `inputs:`" in done.stderr
    assert Bundle(tmp_path / "out").router_kind == "projection"


def test_an_addition_with_inputs_calibrates_all_tasks_again(root, tmp_path, texts):
    recipe, _ = write_recipe(text_bundle(root), tmp_path, ["spam", "topic"], texts)
    assert run("merge", recipe, tmp_path / "out").exit_code == 0
    _, data = write_recipe(text_bundle(root), tmp_path, ["mood"], texts)
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"tasks": data["tasks"]}))
    done = run("add", tmp_path / "out", tmp_path / "more.yaml", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["calibration"]["inputs"] == dict.fromkeys(TEXTS, 2)
    assert Bundle(tmp_path / "out").router_kind != "projection"
