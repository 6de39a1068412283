"""Several heads of one expert: one routing target that answers with all of them."""

import shutil

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import massmerge
from massmerge import MassError
from massmerge.cli.main import main
from massmerge.merging.verify import verify_bundle
from models import text_bundle

STARS, LENGTH = ["one", "two", "three"], ["words"]


def recipe_with(folder, **spam):
    """The recipe of the text example with further heads of its first task."""
    data = yaml.safe_load((folder / "recipe.yaml").read_text())
    data["tasks"][0] |= spam
    (folder / "heads.yaml").write_text(yaml.safe_dump(data))
    return folder / "heads.yaml"


@pytest.fixture(scope="module")
def example(root, tmp_path_factory):
    """The text example with the files of two further heads."""
    folder = tmp_path_factory.mktemp("heads") / "example"
    shutil.copytree(text_bundle(root).parent, folder)
    width = massmerge.load(folder / "bundle").core.base.config.hidden_size
    draw = torch.Generator().manual_seed(0)
    save_file({"weight": torch.randn(3, width, generator=draw)}, folder / "stars.safetensors")
    save_file({"weight": torch.randn(1, width, generator=draw)}, folder / "length.safetensors")
    return folder


@pytest.fixture(scope="module")
def bundle(example):
    heads = {
        "stars": {"weights": "stars.safetensors", "labels": STARS, "features": "mean"},
        "length": {"weights": "length.safetensors", "labels": LENGTH, "features": "mean"},
    }
    massmerge.merge(recipe_with(example, heads=heads), example / "out")
    return example / "out"


def test_every_head_of_the_task_answers(bundle, example):
    model = massmerge.load(bundle)
    answer = model.predict("win a free prize now", task="spam")[0]
    plain = massmerge.load(example / "bundle").predict("win a free prize now", task="spam")[0]
    assert (answer.label, answer.score) == (plain.label, pytest.approx(plain.score, abs=1e-3))
    stars, length = answer.heads["stars"], answer.heads["length"]
    assert stars.task == "spam" and stars.label in STARS
    assert sum(one.score for one in (stars, *stars.alternatives)) == pytest.approx(1)
    assert (length.label, length.value) == ("words", length.logit)


def test_a_further_head_gives_what_its_layer_gives(bundle, example):
    model = massmerge.load(bundle)
    batch = next(model.core.batches(["win a free prize now"], 1))
    routing = model.stages.route(batch, model.stages.choice(model.core.positions("spam")))[0]
    hidden = model.sets.forward(batch, routing, for_heads=True).output.last_hidden_state[0]
    expected = load_file(example / "stars.safetensors")["weight"] @ hidden.mean(0)
    answer = model.predict("win a free prize now", task="spam")[0].heads["stars"]
    found = {one.label: one.logit for one in (answer, *answer.alternatives)}
    assert [found[label] for label in STARS] == pytest.approx(expected.tolist(), abs=1e-4)


def test_other_tasks_have_no_further_answers_and_routing_stays(bundle, example):
    texts = ["win a prize", "the team won", "sad song"]
    found, plain = (massmerge.load(path).predict(texts) for path in (bundle, example / "bundle"))
    assert [one.task for one in found] == [one.task for one in plain]
    assert all(bool(one.heads) == (one.task == "spam") for one in found)


def test_further_heads_stay_when_tasks_are_removed(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    massmerge.remove(copy, ["mood"])
    assert verify_bundle(copy).ok
    assert massmerge.Bundle(copy).tasks[0].heads == {"stars": tuple(STARS), "length": tuple(LENGTH)}
    assert massmerge.load(copy).predict("win", task="spam")[0].heads.keys() == {"stars", "length"}


def test_heads_count_as_heads_and_not_against_the_budget(bundle):
    found = massmerge.Bundle(bundle)
    plain = massmerge.Bundle(bundle.parent / "bundle")
    assert found.head_bytes - plain.head_bytes >= 4 * 4 * massmerge.load(bundle).core.base.config.hidden_size
    assert abs(found.counted_bytes - plain.counted_bytes) < 3000  # recipe and manifest name them


def test_a_table_shows_every_answer(bundle):
    found = CliRunner().invoke(main, ["predict", str(bundle), "win a free prize now", "--task", "spam"])
    assert "; stars: " in found.output and "; length: " in found.output


@pytest.mark.parametrize(
    ("heads", "merge", "said"),
    [
        ({"stars": {"weights": "stars.safetensors", "labels": ["a"]}}, {}, r"heads\.stars: has 1 labels.*3 outputs"),
        ({"a/b": {"weights": "stars.safetensors", "labels": STARS}}, {}, "not a valid task name"),
        ({"stars": {"weights": "stars.safetensors", "labels": STARS}}, {"method": "average"}, "one head per task"),
    ],
)
def test_heads_that_cannot_be_are_refused(example, tmp_path, heads, merge, said):
    data = yaml.safe_load(recipe_with(example, heads=heads).read_text())
    (example / "bad.yaml").write_text(yaml.safe_dump(data | ({"merge": merge} if merge else {})))
    with pytest.raises(MassError, match=f"(?s){said}"):
        massmerge.merge(example / "bad.yaml", tmp_path / "out")
