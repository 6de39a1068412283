"""Static merges at work: their answers, the scale that is chosen on data, and the command that does both."""

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, BertForSequenceClassification

from massmerge import InputError, Recipe, merge
from massmerge.cli.demo.example import make_example
from massmerge.cli.main import main
from massmerge.evaluation.scales import best_scale, rescaled_weights, with_scale
from massmerge.merging.open_recipe import open_recipe
from massmerge.model.static import StaticModel
from models import rewrite, text_bundle

TEXTS = ["win a free prize now", "vote on the law", "a sad film", "the team won the match", "call now", "happy song"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The example with recipes of static merges: average, sum (scale auto) and emr."""
    folder = tmp_path_factory.mktemp("static")
    recipe = yaml.safe_load(make_example(folder).read_text())
    base = load_file(folder / "base" / "model.safetensors")
    for task in ("spam", "topic"):  # changes so large that answers depend on their scale
        rewrite(
            folder / task, lambda state: {n: _farther(base.get(n.removeprefix("bert.")), v) for n, v in state.items()}
        )
    for method in ("average", "task_arithmetic", "emr"):
        (folder / f"{method}.yaml").write_text(yaml.safe_dump({**recipe, "merge": {"method": method}}))
    return folder


def _farther(base: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if base is None else base + 6 * (tensor - base)


@pytest.fixture(scope="module")
def average(folder) -> StaticModel:
    return StaticModel(merge(folder / "average.yaml", folder / "average", workers=1))


@pytest.fixture(scope="module")
def apart(folder) -> StaticModel:
    return StaticModel(merge(folder / "emr.yaml", folder / "emr", workers=1))


def plain_logits(folder: Path, backbone: Path, task: str, text: str) -> torch.Tensor:
    """What the task's own class answers around a merged backbone, by transformers alone."""
    expert = BertForSequenceClassification.from_pretrained(folder / task).eval()
    expert.bert.load_state_dict(AutoModel.from_pretrained(backbone).state_dict())
    tokens = AutoTokenizer.from_pretrained(folder / "base")(text, return_tensors="pt")
    with torch.inference_mode():
        return expert(**tokens).logits[0]


def test_with_the_task_told_it_answers_as_transformers_does(folder, average):
    for text, answer in zip(TEXTS, average.predict(TEXTS, task="topic", batch_size=4), strict=True):
        logits = plain_logits(folder, folder / "average", "topic", text)
        assert (answer.task, answer.label) == ("topic", average.labels["topic"][int(logits.argmax())])
        assert answer.logit == pytest.approx(float(logits.max()), abs=1e-4)


def test_with_the_head_unknown_the_largest_logit_of_all_heads_answers(average):
    for text, answer in zip(TEXTS, average.predict(TEXTS), strict=True):
        each = [average.predict(text, task=task)[0] for task in average.tasks]
        best = max(each, key=lambda found: found.logit)
        assert (answer.task, answer.label) == (best.task, best.label)


def test_outcomes_are_the_answers_without_and_with_the_task(average):
    tasks = ["topic", "spam", "mood", "topic", "spam", "mood"]
    pairs = average.outcomes(TEXTS, tasks, batch_size=4)
    for text, task, (free, told) in zip(TEXTS, tasks, pairs, strict=True):
        assert (free.task, free.label) == (average.predict(text)[0].task, average.predict(text)[0].label)
        assert (told.task, told.label) == (task, average.predict(text, task=task)[0].label)


def test_a_method_that_keeps_the_tasks_answers_each_with_its_own_model(folder, apart):
    tasks = ["topic", "spam", "spam", "topic", "spam", "topic"]
    for text, task, (free, told) in zip(TEXTS, tasks, apart.outcomes(TEXTS, tasks), strict=True):
        logits = plain_logits(folder, folder / "emr" / task, task, text)
        assert free.task is None and told.logit == pytest.approx(float(logits.max()), abs=1e-4)


def test_a_method_that_keeps_the_tasks_must_be_told_which(apart):
    with pytest.raises(InputError, match="Name the task"):
        apart.predict(TEXTS)
    with pytest.raises(InputError, match="no task 'music'"):
        apart.predict(TEXTS, task="music")


def test_one_merged_model_weighs_what_the_base_weighs_and_emr_more(average, apart):
    base = sum(p.numel() * 4 for p in average.backbone.parameters())
    assert average.nbytes == base
    # One more model, and of the two full experts a bit for each weight; the adapter changes few.
    assert 2 * base + 2 * base / 32 < apart.nbytes < 2 * base + 3 * base / 32 + 10_000


def test_a_bundle_and_a_damaged_merge_are_refused(folder, average, root):
    with pytest.raises(InputError, match=r"a bundle. Load it with massmerge.load"):
        StaticModel(text_bundle(root))
    path = average.path / "heads" / "mood" / "labels.json"
    kept = path.read_text()
    path.write_text('["happy", "negative"]')
    try:
        with pytest.raises(InputError, match="damaged"):
            StaticModel(average.path)
    finally:
        path.write_text(kept)


# The scale that is chosen on data


@pytest.fixture(scope="module")
def suite(folder) -> Path:
    """Validation rows that the sum of the deltas answers right at the scale 0.7, as its own answers are their labels."""
    recipe = with_scale(Recipe.load(folder / "task_arithmetic.yaml"), 0.7)
    model = StaticModel(merge(recipe, folder / "seventh", folder=folder, workers=1))
    tasks = {}
    for task in ("spam", "topic"):
        rows = [{"text": text, "label": model.predict(text, task=task)[0].label} for text in TEXTS]
        with (folder / f"{task}.validation.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows)
        tasks[task] = {"data": f"{task}.{{split}}.csv", "input": "text"}
    (folder / "suite.yaml").write_text(yaml.safe_dump({"tasks": tasks}))
    return folder / "suite.yaml"


def test_a_candidate_is_the_merge_with_that_scale(folder, suite):
    recipe = Recipe.load(folder / "task_arithmetic.yaml")
    unit = merge(with_scale(recipe, 1.0), folder / "unit", folder=folder, workers=1)
    state = AutoModel.from_pretrained(folder / "seventh").state_dict()
    weights = rescaled_weights(open_recipe(recipe, folder, download=False), unit)(0.7)
    assert len(weights) > 60
    assert all(torch.allclose(weights[name], state[name], atol=1e-6) for name in weights)


def test_the_search_ends_when_it_gets_no_better():
    tried = best_scale([i / 10 for i in range(1, 31)], lambda scale: -abs(scale - 0.5))
    assert tried.scale == 0.5 and list(tried.figures)[-1] == 0.8


def run(*arguments: object):
    return CliRunner().invoke(main, ["merge", *map(str, arguments)])


def test_the_command_says_what_each_scale_gave_and_writes_the_first_of_the_best(folder, suite, tmp_path):
    done = run(folder / "task_arithmetic.yaml", tmp_path / "out", "--suite", suite, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    scales = {float(scale): figure for scale, figure in found["scales"].items()}
    assert list(scales)[:7] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert scales[0.7] == 1.0 and min(scales.values()) < 1.0
    assert found["scale"] == min(scale for scale, figure in scales.items() if figure == 1.0)
    assert f"scale: {found['scale']}" in (tmp_path / "out" / "mass_recipe.yaml").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("average", "average has none. Leave it out"), ("recipe", "mass has none"), ("given", "the recipe gives it: 0.2")],
)
def test_a_scale_that_cannot_be_chosen_is_refused(folder, suite, tmp_path, recipe, message):
    given = yaml.safe_load((folder / "task_arithmetic.yaml").read_text())
    given["merge"]["scale"] = 0.2
    (folder / "given.yaml").write_text(yaml.safe_dump(given))
    done = run(folder / f"{recipe}.yaml", tmp_path / "out", "--suite", suite)
    assert done.exit_code == 2 and message in done.stderr


def test_a_suite_without_the_split_is_refused_before_any_work(folder, suite, tmp_path):
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump({"tasks": {"spam": {"data": "spam.csv", "input": "text"}}}))
    done = run(folder / "task_arithmetic.yaml", tmp_path / "out", "--suite", tmp_path / "suite.yaml")
    assert done.exit_code == 2 and "validation" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["suite.yaml"]
