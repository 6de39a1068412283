"""Heads as a merge finds and writes them, and the names of their labels."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from massmerge.errors import InputError
from massmerge.merging.heads import find_head
from massmerge.merging.heads.labels import read_labels
from massmerge.merging.heads.sources import write_head
from massmerge.merging.open_recipe import make_plan
from massmerge.recipe import TaskRecipe
from models import FAMILIES, open_pair

BERT = FAMILIES["bert"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT base, an expert of three named labels, and one without a head."""
    folder = tmp_path_factory.mktemp("heads")
    base = BERT.make_base()
    base.save_pretrained(folder / "base")
    expert = BERT.make_expert(base, 0, 3)
    expert.config.id2label = {0: "no", 1: "maybe", 2: "yes"}
    expert.save_pretrained(folder / "expert")
    base.save_pretrained(folder / "bare")
    return folder


def find(folder, expert="expert", **task):
    recipe = TaskRecipe.model_validate({"name": "t", "expert": expert, **task})
    base, opened = open_pair(folder, expert)
    return find_head(recipe, opened, base, folder)


def linear(folder, tensors=None, labels=("a", "b"), **options):
    """A linear head's file and the recipe's words for it."""
    save_file(tensors or {"weight": torch.ones(2, 32), "bias": torch.ones(2)}, folder / "head.safetensors")
    return {"weights": "head.safetensors", "labels": labels if isinstance(labels, str) else list(labels), **options}


def refusal(folder, **task):
    with pytest.raises(InputError) as caught:
        find(folder, **task)
    return str(caught.value)


# A head cut from the expert


def test_labels_are_those_of_the_expert_s_configuration(folder):
    assert find(folder).labels == ("no", "maybe", "yes")


def test_labels_of_the_recipe_go_before_those_of_the_expert(folder):
    assert find(folder, labels=["x", "y", "z"]).labels == ("x", "y", "z")


def test_an_expert_without_a_head_has_none(folder):
    head = find(folder, "bare")
    assert (head.kind, head.labels, head.nbytes) == ("none", None, 0)


@pytest.mark.parametrize("labels", [["x"], ["w", "x", "y", "z"]])
def test_labels_that_do_not_match_the_head_are_refused_with_both_numbers(folder, labels):
    message = refusal(folder, labels=labels)
    assert f"has {len(labels)} labels, but its head has 3 outputs" in message
    assert "Give one label for each output" in message


def test_labels_that_stand_there_twice_are_refused_by_name(folder):
    message = refusal(folder, labels=["x", "y", "x"])
    assert "'x'" in message and "'y'" not in message


def test_labels_for_an_expert_without_a_head_are_refused_with_the_remedy(folder):
    assert "Give `head:` too" in refusal(folder, expert="bare", labels=["x"])


def test_the_problem_names_the_task(folder, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    task = {"name": "spam", "expert": str(folder / "expert"), "labels": ["x"]}
    recipe.write_text(json.dumps({"base": str(folder / "base"), "tasks": [task]}))
    assert [p.where for p in make_plan(recipe).errors] == [f"task spam ({folder / 'expert'})"]


def test_a_written_head_holds_its_tensors_its_class_and_its_labels(folder, tmp_path):
    write_head(tmp_path, find(folder))
    state = load_file(folder / "expert" / "model.safetensors")
    written = load_file(tmp_path / "head" / "model.safetensors")
    assert written.keys() == {"classifier.weight", "classifier.bias"}
    assert all(tensor.equal(state[name]) for name, tensor in written.items())
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert json.loads((tmp_path / "labels.json").read_text()) == ["no", "maybe", "yes"]


def test_the_size_of_a_head_is_known_before_it_is_read(folder):
    assert find(folder).nbytes == 4 * (3 * 32 + 3)


# A linear head in a file


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_head_is_written_as_it_was_given(folder, tmp_path, bias):
    tensors = {"weight": torch.randn(2, 32), **({"bias": torch.randn(2)} if bias else {})}
    write_head(tmp_path, find(folder, "bare", head=linear(folder, tensors, normalize=True, scale=100.0)))
    written = load_file(tmp_path / "head" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(tensor.equal(tensors[name]) for name, tensor in written.items())
    options = json.loads((tmp_path / "head" / "linear.json").read_text())
    assert (options["normalize"], options["scale"]) == (True, 100.0)


def test_a_linear_head_goes_before_the_expert_s_own(folder):
    assert find(folder, head=linear(folder)).kind == "linear"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"bias": torch.ones(2)}, r"this file holds ['bias']"),
        ({"weight": torch.ones(2)}, "`weight (labels, features)`"),
        ({"weight": torch.ones(2, 32), "scale": torch.ones(1)}, "'scale'"),
        ({"weight": torch.ones(2, 32), "bias": torch.ones(3)}, "bias (3,) does not fit weight (2, 32)"),
        ({"weight": torch.ones(2, 31)}, "takes 31 features, the base gives 32"),
        ({"weight": torch.ones(5, 32)}, "has 2 labels, but its head has 5 outputs"),
    ],
    ids=["no weight", "one dimension", "one too many", "other bias", "other width", "other labels"],
)
def test_a_linear_head_of_the_wrong_shape_is_refused(folder, tensors, words):
    assert words in refusal(folder, head=linear(folder, tensors))


def test_a_missing_linear_head_is_refused_with_the_place_looked_at(folder):
    message = refusal(folder, head={"weights": "nowhere.safetensors", "labels": ["a"]})
    assert f"nowhere.safetensors: no such file (looked for {folder.resolve() / 'nowhere.safetensors'})" in message


def test_labels_given_twice_are_refused(folder):
    assert "has its labels twice" in refusal(folder, head=linear(folder), labels=["a", "b"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["linear", "cut"])
def test_a_head_that_is_not_finite_is_refused_by_the_tensor_s_name(tmp_path, kind, value):
    base = BERT.make_base()
    base.save_pretrained(tmp_path / "base")
    expert = BERT.make_expert(base, 0, 2)
    with torch.no_grad():
        expert.classifier.weight[0, 0] = value
    expert.save_pretrained(tmp_path / "expert")
    task = {"head": linear(tmp_path, {"weight": expert.classifier.weight.detach()})} if kind == "linear" else {}
    head = find(tmp_path, **task)
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=r"weight holds NaN or infinity"):
        write_head(tmp_path / "out", head)


# Files of labels


@pytest.mark.parametrize(("name", "text"), [("l.txt", "a\n\n b \nc d\n"), ("l.json", '["a", "b", "c d"]')])
def test_labels_may_be_a_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_labels(name, tmp_path) == ("a", "b", "c d")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("l.json", "[", "not valid JSON"),
        ("l.json", '{"0": "a"}', "must be a JSON list of strings"),
        ("l.json", "[1, 2]", "must be a JSON list of strings"),
        ("l.txt", None, "cannot be read as labels"),
    ],
)
def test_a_file_that_holds_no_labels_is_refused_by_name(tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=rf"{name}: {words}"):
        read_labels(name, tmp_path)


# Heads of several layers


def layered(folder, state, labels=("a", "b"), **options):
    torch.save(state, folder / "layers.pt")
    return {"weights": "layers.pt", "labels": list(labels), "features": "cls", **options}


def test_layers_are_found_in_order_and_written_with_what_stands_between_them(folder, tmp_path):
    state = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).state_dict()
    write_head(tmp_path, find(folder, "bare", head=layered(folder, state, activation="tanh")))
    written = load_file(tmp_path / "head" / "model.safetensors")
    names = dict(zip(["0.weight", "0.bias", "1.weight", "1.bias"], state, strict=True))
    assert all(written[ours].equal(state[theirs]) for ours, theirs in names.items())
    options = json.loads((tmp_path / "head" / "linear.json").read_text())
    assert [layer["activation"] for layer in options["layers"]] == ["tanh", "none"]


def test_a_layer_of_a_larger_file_is_found_by_its_name(folder):
    state = {"encoder.layer.0.dense.weight": torch.ones(32, 32), "tone.weight": torch.ones(3, 32)}
    assert find(folder, "bare", head=layered(folder, state, "xyz", layers="tone")).labels == ("x", "y", "z")


@pytest.mark.parametrize(
    ("state", "options", "words"),
    [
        ({"a.weight": torch.ones(4, 32), "b.weight": torch.ones(2, 4)}, {}, "give `activation:`"),
        ({"a.weight": torch.ones(4, 32), "b.weight": torch.ones(2, 9)}, {}, "Name the head's layers in it with `layers:`"),
        ({"a.weight": torch.ones(2, 32)}, {"layers": ["c"]}, "has no layer c. Its linear layers:\n    a"),
        ({"a.weight": torch.ones(4, 32), "b.weight": torch.ones(2, 9)}, {"layers": ["a", "b"], "activation": "relu"},
         "b takes 9 features, the layer before gives 4"),
    ],
    ids=["no activation", "no chain", "no such layer", "other width"],
)  # fmt: skip
def test_layers_that_are_no_head_are_refused_with_the_remedy(folder, state, options, words):
    assert words in refusal(folder, expert="bare", head=layered(folder, state, **options))


# SetFit


def test_the_pickled_head_of_setfit_stays_closed_and_its_conversion_is_told(folder, tmp_path):
    shutil.copytree(folder / "base", tmp_path / "base")
    shutil.copytree(folder / "bare", tmp_path / "setfit")
    (tmp_path / "setfit" / "model_head.pkl").write_bytes(b"not even a pickle")
    message = refusal(tmp_path, expert="setfit")
    assert "Opening a pickle runs code" in message and str(tmp_path / "setfit" / "model_head.pkl") in message
    lines = [line for line in message.splitlines() if line.startswith("    ")]
    assert len(lines) == 4
    compile("\n".join(line.strip() for line in lines), "told", "exec")
    assert find(tmp_path, "setfit", head=linear(tmp_path)).kind == "linear"
