"""What heads answer: one label, any number of labels, a number; and no answer where the output is no number."""

import csv
import json

import pytest
import torch
import yaml
from click.testing import CliRunner
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertForSequenceClassification, BertForTokenClassification

import massmerge
from massmerge import InputError, MassError
from massmerge.bundle.manifest import read_manifest, write_manifest
from massmerge.bundle.reader import Bundle
from massmerge.cli.demo.example import make_writing_example
from massmerge.cli.main import main
from massmerge.merging.open_recipe import make_plan, open_recipe
from massmerge.model.answers import make_prediction
from massmerge.model.export import export_bundle
from massmerge.model.static import StaticModel
from massmerge.recipe import AnswerOptions, Recipe
from massmerge.research.peers import PEERS
from models import FAMILIES, write_family
from problem_types import TEXTS, change_config, change_tensors, made, overflowing, write_example
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


def answer(logits, problem=SEVERAL, **options):
    names = tuple("abcdefgh"[: len(logits)])
    return make_prediction(
        {"t": torch.tensor(logits)}, {"t": names}, {"t": problem}, {"t": 1.0}, AnswerOptions(**options), top=2
    )


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


# No number, no answer


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_output_that_is_not_finite_is_an_error_and_no_label(value):
    found = answer([1.0, value], ONE)
    assert (found.task, found.label, found.score) == (None, None, None)
    assert "t gives NaN or infinity for this input" in found.error


@pytest.fixture(scope="module")
def broken(root):
    """A bundle whose task `topic` overflows."""
    folder = root / "broken"
    recipe = write_example(folder)
    change_tensors(folder / "topic", overflowing)
    return massmerge.merge(recipe, folder / "bundle")


def test_python_raises_or_gives_the_error_in_the_row(broken):
    model = massmerge.load(broken)
    with pytest.raises(MassError, match="topic gives NaN or infinity"):
        model.predict(TEXTS, task="topic")
    rows = model.predict(TEXTS, task="topic", on_error="row")
    assert all(p.task is None and p.label is None and "NaN or infinity" in p.error for p in rows)
    assert all(p.error is None for p in model.predict(TEXTS, task="mood"))


def test_the_command_writes_the_error_and_exits_with_1(broken):
    done = CliRunner().invoke(main, ["predict", str(broken), TEXTS[0], "--task", "topic", "--json"])
    assert done.exit_code == 1 and "NaN or infinity" in json.loads(done.stdout.splitlines()[0])["error"]
    assert "NaN" not in done.stdout.replace("NaN or infinity", "")


def test_the_service_answers_the_others_of_a_batch(broken):
    with serving(broken) as running:
        bad = running.predict(TEXTS, task="topic").json()["predictions"]
        assert {one["error"]["code"] for one in bad} == {"unanswerable"} and {one["label"] for one in bad} == {None}
        good = running.predict(TEXTS, task="mood").json()["predictions"]
        assert all(one["error"] is None and one["label"] for one in good)


@pytest.mark.parametrize("method", ["mass", "average"])
def test_an_expert_scaled_beyond_float32_is_refused_at_merge_by_name(tmp_path, method):
    recipe = write_family(tmp_path, "bert", {"a": 2, "b": 2}, method=method)
    change_tensors(tmp_path / "b", lambda state: [t.mul_(1e38) for n, t in state.items() if "query.weight" in n])
    with pytest.raises(
        InputError, match=r"task b \(b\): encoder\.layer\.\d\.attention\.self\.query\.weight holds numbers"
    ):
        massmerge.merge(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_product_that_overflows_is_refused_at_merge(tmp_path):
    recipe = write_example(tmp_path)
    path = tmp_path / "mood" / "adapter_model.safetensors"
    large = {name: tensor * (1e19 if "lora" in name else 1) for name, tensor in load_file(path).items()}
    save_file(large, path)
    with pytest.raises(InputError, match="the delta of mood is too large for float32"):
        massmerge.merge(recipe, tmp_path / "out")


# Tasks without heads


def clip_recipe(tmp_path, heads, **merge):
    recipe = write_family(tmp_path, "clip", {"a": 2, "b": 2}, **{"rank": 8, **merge})
    data = yaml.safe_load(recipe.read_text())
    for task in data["tasks"]:
        if task["name"] in heads:
            save_file({"weight": torch.randn(2, 32)}, tmp_path / f"{task['name']}.safetensors")
            task["head"] = {"weights": f"{task['name']}.safetensors", "labels": ["cat", "dog"]}
    recipe.write_text(yaml.safe_dump(data))
    return recipe


def test_a_task_without_a_head_beside_others_is_refused_by_plan_and_merge(tmp_path):
    recipe = clip_recipe(tmp_path, "a")
    (problem,) = make_plan(recipe).errors
    assert problem.where == "task b" and "no head that gives labels" in problem.message and "`head:`" in problem.message
    with pytest.raises(InputError, match="task b: has no head"):
        massmerge.merge(recipe, tmp_path / "bundle")


def test_tasks_of_which_none_has_a_head_are_merged(tmp_path):
    assert not make_plan(clip_recipe(tmp_path, "")).problems


def test_a_static_merge_needs_no_heads(tmp_path):
    recipe = clip_recipe(tmp_path, "a")
    data = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**data, "merge": {"method": "average"}}))
    assert not make_plan(recipe).errors


@pytest.fixture
def headless(tmp_path):
    """A bundle as older versions wrote it: one of its two tasks has no head."""
    bundle = massmerge.merge(clip_recipe(tmp_path, "ab"), tmp_path / "bundle")
    for name in ("labels.json", "head/linear.json", "head/model.safetensors"):
        (bundle / "tasks" / "b" / name).unlink()
    manifest = read_manifest(bundle)
    manifest["tasks"][1]["head"] = "none"
    write_manifest(bundle, {k: v for k, v in manifest.items() if k not in ("files", "sha256")})
    return bundle


def test_a_bundle_with_a_task_without_a_head_answers_with_the_others(headless):
    model = massmerge.load(headless)
    rows = list(FAMILIES["clip"].make_inputs(12)["pixel_values"])
    found = model.predict(rows, on_error="row")
    for prediction, routing in zip(found, model.route(rows), strict=True):
        if routing.selected == ["a"]:
            assert prediction.task == "a" and prediction.label in ("cat", "dog")
        else:
            assert prediction.task is None and prediction.error == "belongs to b, which has no head to answer with."
    with pytest.raises(InputError, match=r"^b: no head"):
        model.predict(rows, task="b")


def test_such_a_bundle_can_still_be_changed(headless, tmp_path):
    massmerge.remove(headless, ["b"], out=tmp_path / "one")
    assert massmerge.load(tmp_path / "one").tasks == ["a"]


# What a linear head reads


def pooled_recipe(tmp_path, trained, **head):
    """Two text experts with linear heads from files; the pooler of `a` is the base's unless it was trained."""
    recipe = write_family(tmp_path, "bert", {"a": 2, "b": 2}, rank=4)
    base = FAMILIES["bert"].make_base().state_dict()
    if not trained:
        change_tensors(
            tmp_path / "a",
            lambda state: state.update({f"bert.{n}": t.clone() for n, t in base.items() if n.startswith("pooler.")}),
        )
    data = yaml.safe_load(recipe.read_text())
    save_file({"weight": torch.randn(2, 32)}, tmp_path / "a.safetensors")
    data["tasks"][0]["head"] = {"weights": "a.safetensors", "labels": ["x", "y"], **head}
    recipe.write_text(yaml.safe_dump(data))
    return recipe


class Heard:
    """Keeps the warnings of a merge."""

    def __init__(self):
        self.warnings = []

    def start(self, total, done): ...
    def tensor(self, name): ...
    def phase(self, name): ...

    def warning(self, problem):
        self.warnings.append(problem)


@pytest.mark.parametrize(
    ("trained", "head", "features"),
    [(False, {}, "mean"), (True, {}, "auto"), (False, {"features": "pooled"}, "pooled")],
    ids=["never trained", "trained", "told"],
)
def test_a_head_reads_a_pooler_only_if_it_was_trained_or_told(tmp_path, trained, head, features):
    heard = Heard()
    bundle = massmerge.merge(pooled_recipe(tmp_path, trained, **head), tmp_path / "bundle", progress=heard)
    options = json.loads((bundle / "tasks/a/head/linear.json").read_text())
    assert options["features"] == features
    told = [p for p in heard.warnings if "pooler" in p.message]
    assert len(told) == (features == "mean")
    assert all("task a (a)" in p.where and "Set `features: pooled`" in p.message for p in told)


def test_a_peer_reads_what_the_bundle_would(tmp_path):
    peer = PEERS["smile_1"](
        open_recipe(Recipe.load(pooled_recipe(tmp_path, False)), tmp_path, download=True), gate=4, rank=6
    )
    assert peer.core.heads["a"]._options.features == "mean"


# What is written


def test_a_text_that_was_computed_from_nan_is_an_error(tmp_path):
    recipe = make_writing_example(tmp_path)
    layer = "decoder.block.0.layer.2"
    # Each is small enough to be merged; their product is not finite.
    scales = {f"{layer}.layer_norm": 1e18, f"{layer}.DenseReluDense.wi": 1e10, f"{layer}.DenseReluDense.wo": 1e12}
    change_tensors(tmp_path / "question", lambda state: [state[f"{n}.weight"].mul_(s) for n, s in scales.items()])
    model = massmerge.load(massmerge.merge(recipe, tmp_path / "bundle"))
    rows = model.generate(TEXTS[:2], task="question", on_error="row", max_new_tokens=3)
    assert all(one.text is None and one.task is None and "NaN or infinity" in one.error for one in rows)
    with pytest.raises(MassError, match="NaN or infinity"):
        model.generate(TEXTS[:2], task="question", max_new_tokens=3)
    assert all(one.error is None and one.tokens for one in model.generate(TEXTS[:2], task="summary", max_new_tokens=3))
