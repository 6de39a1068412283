"""What heads answer: one label, any number of labels, a number; and no answer where the output is no number."""

import csv
import json

import pytest
import torch
import yaml
from click.testing import CliRunner
from pyarrow import parquet
from safetensors.torch import save_file
from transformers import AutoTokenizer, BertForSequenceClassification, BertForTokenClassification

import massmerge
from massmerge.bundle.reader import Bundle
from massmerge.cli.main import main
from massmerge.merging.open_recipe import make_plan, open_recipe
from massmerge.model.answers import make_prediction
from massmerge.model.export import export_bundle
from massmerge.model.static import StaticModel
from massmerge.recipe import AnswerOptions, Recipe
from massmerge.research.peers import PEERS
from models import FAMILIES, write_family
from problem_types import TEXTS, answer, change_config, made, write_example
from serving import serving

ONE, SEVERAL, NUMBER = "single_label_classification", "multi_label_classification", "regression"


@pytest.fixture(scope="module")
def folder(root):
    return made(root)


@pytest.fixture(scope="module")
def model(folder):
    return massmerge.load(folder / "bundle")


def expert_logits(folder, task, texts):
    """What transformers computes with the bundle's update of a task, from the expert itself."""
    expert = BertForSequenceClassification.from_pretrained(folder / task).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    with torch.inference_mode():
        return expert(**tokenizer(texts, padding=True, return_tensors="pt")).logits


# Any number of labels


def test_a_multi_label_task_gives_every_label_above_one_half_with_its_sigmoid(tmp_path):
    recipe = write_example(tmp_path)
    recipe.write_text(recipe.read_text().replace("budget: 2.0", "rank: 128"))
    model = massmerge.load(massmerge.merge(recipe, tmp_path / "bundle"))
    names = model.labels["topic"]
    for found, logits in zip(model.predict(TEXTS, task="topic"), expert_logits(tmp_path, "topic", TEXTS), strict=True):
        expected = {name: p for name, p in zip(names, logits.sigmoid().tolist(), strict=True) if p > 0.5}
        assert dict(zip(found.labels, found.scores, strict=True)) == pytest.approx(expected, abs=1e-3)
        assert found.scores == sorted(found.scores, reverse=True) and found.value is None
        assert (found.label, found.score) == ((found.labels[0], found.scores[0]) if expected else (None, None))


def test_where_no_label_passes_there_is_none_and_the_best_are_alternatives():
    found = answer([-1.0, -3.0, -2.0])
    assert (found.task, found.label, found.score, found.labels, found.scores) == ("t", None, None, [], [])
    assert [a.label for a in found.alternatives] == ["a", "c"]
    assert found.error is None


def test_other_heads_say_nothing_of_several_labels():
    found = answer([3.0, 1.0], ONE)
    assert (found.label, found.labels, found.scores, found.value) == ("a", None, None, None)


# A number


def test_a_regression_task_gives_its_output_as_a_value(folder, model):
    found = model.predict(TEXTS, task="spam")
    expected = expert_logits(folder, "spam", TEXTS)[:, 0].tolist()
    assert [p.value for p in found] == pytest.approx(expected, abs=0.1)
    assert {(p.label, p.score, p.labels) for p in found} == {("stars", None, None)}


def two(weights, problems, logits=((1.0,), (0.5, 0.1))):
    values = {task: torch.tensor(row) for task, row in zip(problems, logits, strict=True)}
    names = {task: tuple(f"{task}{i}" for i in range(len(row))) for task, row in values.items()}
    return make_prediction(values, names, problems, weights, AnswerOptions(), top=3)


def test_a_number_is_not_compared_with_labels_but_answers_where_the_router_likes_its_task_best():
    problems = {"number": NUMBER, "class": ONE}
    first = two({"number": 0.6, "class": 0.4}, problems)
    assert (first.task, first.value) == ("number", 1.0)
    second = two({"number": 0.4, "class": 0.6}, problems, ((9.0,), (0.5, 0.1)))
    assert (second.task, second.value) == ("class", None)
    assert [a.value for a in second.alternatives] == [None, 9.0]


def test_a_regression_with_several_outputs_is_refused_with_the_remedy(tmp_path):
    write_family(tmp_path, "bert", {"a": 3})
    change_config(tmp_path / "a", problem_type=NUMBER)
    (problem,) = make_plan(tmp_path / "recipe.yaml").errors
    assert "regression with 3 outputs" in problem.message and "problem_type:" in problem.message


# Where the kind is told


def test_the_recipe_goes_before_the_expert_s_configuration(tmp_path):
    recipe = write_family(tmp_path, "bert", {"a": 3, "b": 2}, rank=4)
    data = yaml.safe_load(recipe.read_text())
    data["tasks"][0]["problem_type"] = SEVERAL
    recipe.write_text(yaml.safe_dump(data))
    bundle = massmerge.merge(recipe, tmp_path / "bundle")
    assert [task.problem_type for task in Bundle(bundle).tasks] == [SEVERAL, ONE]
    assert massmerge.load(bundle).problems == {"a": SEVERAL, "b": ONE}


def test_a_linear_head_from_a_file_can_be_multi_label(tmp_path):
    recipe = write_family(tmp_path, "clip", {"a": 2}, rank=4)
    save_file({"weight": torch.randn(3, 32)}, tmp_path / "a.safetensors")
    data = yaml.safe_load(recipe.read_text())
    data["tasks"][0] |= {"head": {"weights": "a.safetensors", "labels": ["x", "y", "z"]}, "problem_type": SEVERAL}
    recipe.write_text(yaml.safe_dump(data))
    model = massmerge.load(massmerge.merge(recipe, tmp_path / "bundle"))
    (found,) = model.predict([FAMILIES["clip"].make_inputs(1)["pixel_values"][0]])
    assert found.labels is not None and len(found.labels) == sum(s > 0.5 for s in found.scores)


def test_a_problem_type_without_a_head_is_refused(tmp_path):
    recipe = write_family(tmp_path, "clip", {"a": 2})
    data = yaml.safe_load(recipe.read_text())
    data["tasks"][0]["problem_type"] = SEVERAL
    recipe.write_text(yaml.safe_dump(data))
    (problem,) = make_plan(recipe).errors
    assert "has problem_type in the recipe, but its expert has no classification head" in problem.message


def test_a_task_keeps_its_kind_when_another_is_removed(folder, tmp_path):
    massmerge.remove(folder / "bundle", ["mood"], out=tmp_path / "two")
    assert massmerge.load(tmp_path / "two").problems == {"spam": NUMBER, "topic": SEVERAL}


def test_an_exported_checkpoint_says_what_its_outputs_mean(folder, tmp_path):
    export_bundle(folder / "bundle", tmp_path / "hf", "hf", ["topic"])
    assert BertForSequenceClassification.from_pretrained(tmp_path / "hf").config.problem_type == SEVERAL


# Token classification


def token_classifier(folder, form):
    """A recipe whose one expert labels tokens: a checkpoint, or an adapter that says so."""
    recipe = write_family(folder, "bert", {"a": 3})
    if form == "full":
        BertForTokenClassification(FAMILIES["bert"].make_config(3)).save_pretrained(folder / "a")
        return recipe
    recipe = write_example(folder)
    path = folder / "mood" / "adapter_config.json"
    path.write_text(path.read_text().replace("SEQ_CLS", "TOKEN_CLS"))
    return recipe


@pytest.mark.parametrize("form", ["full", "adapter"])
def test_token_classifiers_are_refused_in_words(tmp_path, form):
    (problem,) = make_plan(token_classifier(tmp_path, form)).errors
    assert "BertForTokenClassification, which labels every token" in problem.message


# The same answers by every way


def test_static_merges_and_routed_peers_answer_in_kind(folder, tmp_path):
    recipe = Recipe.load(folder / "recipe.yaml")
    average = recipe.model_copy(update={"merge": type(recipe.merge).model_validate({"method": "average"})})
    massmerge.merge(average, tmp_path / "average", folder=folder)
    static = StaticModel(tmp_path / "average")
    peer = PEERS["smile_1"](open_recipe(recipe, folder, download=True), gate=4, rank=6)
    for one in (static, peer):
        assert one.problems == {"spam": NUMBER, "topic": SEVERAL, "mood": ONE}
        topic, spam, mood = (one.predict(TEXTS[:1], task=task)[0] for task in ("topic", "spam", "mood"))
        assert topic.labels is not None and spam.value is not None and mood.score is not None
    assert all(found.value is None for found in static.predict(TEXTS))  # a number never wins against labels unasked


def test_formats_of_the_command_hold_labels_scores_and_value(folder, tmp_path):
    bundle, texts = str(folder / "bundle"), [*TEXTS[:2]]

    def run(*arguments):
        done = CliRunner().invoke(main, ["predict", bundle, *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    for task in ("topic", "spam"):
        rows = [json.loads(line) for line in run(*texts, "--task", task, "--json").splitlines()]
        run(*texts, "--task", task, "--out", str(tmp_path / "a.csv"))
        run(*texts, "--task", task, "--out", str(tmp_path / "a.parquet"))
        with (tmp_path / "a.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))
        table = parquet.read_table(tmp_path / "a.parquet").to_pylist()
        for row, line, cells in zip(rows, lines, table, strict=True):
            # Each call reads its texts in batches of its own, so numbers differ by rounding.
            assert cells["labels"] == row["labels"] and cells["value"] == pytest.approx(row["value"], abs=1e-6)
            if task == "topic":
                assert json.loads(line["labels"]) == row["labels"] and json.loads(line["scores"]) == pytest.approx(
                    row["scores"], abs=1e-6
                )
                assert cells["scores"] == pytest.approx(row["scores"], abs=1e-6) and row["value"] is None
            else:
                assert (
                    float(line["value"]) == pytest.approx(row["value"], abs=1e-6)
                    and row["labels"] is None
                    and line["labels"] == ""
                )
    shown = run(*texts, "--task", "topic")
    found = massmerge.load(bundle).predict(texts, task="topic")
    assert all((", ".join(p.labels) or "no label") in shown for p in found)


def test_explanations_show_numbers_and_several_labels(folder, tmp_path):
    for task, words in (("topic", "topic"), ("spam", "spam: stars = ")):
        plot = str(tmp_path / "plot.png")
        done = CliRunner().invoke(main, ["explain", str(folder / "bundle"), TEXTS[0], "--task", task, "--plot", plot])
        assert done.exit_code == 0 and words in done.output


def test_the_service_answers_in_kind(folder):
    with serving(folder / "bundle") as running:
        topic, spam = (running.predict(TEXTS[0], task=task, explain=True).json() for task in ("topic", "spam"))
        found, number = topic["predictions"][0], spam["predictions"][0]
        assert len(found["labels"]) == len(found["scores"]) and found["value"] is None
        assert all(one["score"] is not None for one in found["explain"]["heads"]["topic"])
        assert number["labels"] is None and number["score"] is None and number["label"] == "stars"
        assert number["explain"]["heads"]["spam"] == [{"label": "stars", "score": None, "value": number["value"]}]
        classic = running.client.post("/", json={"inputs": TEXTS[0], "parameters": {"task": "spam"}}).json()
        assert classic == [[{"task": "spam", "label": "stars", "score": number["value"]}]]
        tasks = running.client.get("/v1/tasks").json()["tasks"]
        assert {task["name"]: task["problem_type"] for task in tasks} == {"spam": NUMBER, "topic": SEVERAL, "mood": ONE}
        schemas = running.client.get("/openapi.json").json()["components"]["schemas"]
        assert {"labels", "scores", "value"} <= schemas["PredictionAnswer"]["properties"].keys()
        bundle = running.client.get("/v1/bundle").json()
        assert len(bundle["overlap"]) == 3 and 0 < bundle["overlap_by_chance"] < 1
