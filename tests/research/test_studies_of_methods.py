"""The studies that compare methods: their figures against plain computations, and that nothing is computed twice."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer

import massmerge
from massmerge import Bundle, StaticModel, merge
from massmerge.evaluation.from_recipe import open_answering
from massmerge.evaluation.metrics import Given
from massmerge.evaluation.scales import with_scale
from massmerge.merging.open_recipe import open_recipe
from massmerge.recipe import Recipe
from massmerge.research.studies import STUDIES, compared
from massmerge.research.studies.leave_one_out import LentHead
from massmerge.research.studies.methods import method_rows
from massmerge.research.studies.opening import open_studies
from massmerge.research.studies.run import run_studies
from massmerge.research.studies.scaling import counts
from massmerge.research.studies.sceptic import standardised_choice
from massmerge.research.studies.settings import StudySettings
from massmerge.research.studies.statics import StaticMerge, static_recipe, subset
from models import dense_expert
from study_suite import study_bundle, write_study_suite


@pytest.fixture(scope="module")
def bundle(root):
    return study_bundle(root)


@pytest.fixture(scope="module")
def recipe(bundle):
    return bundle.parent / "recipe.yaml"


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return write_study_suite(tmp_path_factory.mktemp("suite"), 6)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("studies")


def run(name, suite, out, bundle, recipe):
    settings = StudySettings(quick=True)
    return run_studies(name, suite, out, bundle=bundle, recipe=recipe, settings=settings)[0].to_dict()


@pytest.fixture(scope="module")
def context(suite, out, bundle, recipe):
    """Not a quick one: scales are chosen."""
    return open_studies(
        [STUDIES["methods"]], suite, out / "whole", StudySettings(), bundle=bundle, recipe=recipe
    ).context


@pytest.fixture(scope="module")
def table(suite, out, bundle, recipe):
    return run("methods", suite, out, bundle, recipe)


def rows_of(table):
    return {row["method"]: row for row in table["rows"]}


def shares(context, answer):
    """For each task the share of rows whose task and label are right, by a function from an input and its task."""
    found = {}
    for task, data in context.ready.data.items():
        given = [answer(data.inputs[i], task) for i in range(len(data))]
        right = [(g.task, g.label) == (task, label) for g, label in zip(given, data.labels, strict=True)]
        found[task] = sum(right) / len(right)
    return found


def test_a_static_merge_has_the_figures_of_its_own_answers(table, context, recipe, tmp_path):
    merged = merge(static_recipe(Recipe.load(recipe), "task_arithmetic"), tmp_path / "out", folder=recipe.parent)
    model = StaticModel(merged)
    row = rows_of(table)["task_arithmetic"]
    assert row["scale"] == 0.3 and row["scale_chosen_on_validation"] is False
    assert row["task_given"]["tasks"] == shares(context, lambda x, task: model.predict(x, task=task)[0])
    assert row["task_unknown"]["tasks"] == shares(context, lambda x, task: model.predict(x)[0])
    assert row["bytes"] == model.nbytes


def test_mass_has_the_figures_of_its_own_answers(table, context, bundle):
    model = massmerge.load(bundle)
    rows = rows_of(table)
    assert rows["mass"]["task_unknown"]["tasks"] == shares(context, lambda x, task: model.predict(x)[0])
    assert rows["mass, task given"]["task_given"]["tasks"] == shares(
        context, lambda x, task: model.predict(x, task=task)[0]
    )
    assert rows["mass"]["bytes"] == Bundle(bundle).counted_bytes


def test_the_base_and_the_experts_stand_beside_the_methods(table, context):
    rows = rows_of(table)
    assert list(rows) == [
        "base",
        "task_arithmetic",
        "tsv_m",
        "base, routed",
        _routed(rows),
        "smile_1",
        "mass",
        "mass, task given",
        "experts",
    ]
    assert rows["experts"]["task_given"]["tasks"] == context.references
    assert rows["experts"]["task_given"]["normalised"] == pytest.approx(1.0) or 0 in context.references.values()
    assert rows["base"]["of_the_base"] == pytest.approx(1.0, abs=0.05) and rows["experts"]["of_the_base"] > 2.8
    assert table["verdict"]["mass_value"] == rows["mass"]["task_unknown"]["mean"]


def _routed(rows):
    return f"{max(('task_arithmetic', 'tsv_m'), key=lambda name: rows[name]['task_given']['mean'])}, routed"


def test_one_model_with_our_router_has_the_figures_of_its_own_answers(table, context, bundle):
    model, rows = massmerge.load(bundle), rows_of(table)
    once = rows["base, routed"]
    assert once["task_unknown"]["tasks"] == shares(context, lambda x, task: model.predict(x, passes=1)[0])
    assert once["task_given"]["tasks"] == rows["base"]["task_given"]["tasks"]
    assert rows["base"]["bytes"] < once["bytes"] < rows["mass"]["bytes"]
    static = rows[_routed(rows)]
    assert static["task_given"] == rows[_routed(rows).removesuffix(", routed")]["task_given"]
    assert any("One model with the same heads and the same router" in one for one in table["sentences"])


def test_heads_are_compared_by_how_unusual_their_logits_are():
    """Head a has the larger logits everywhere; standardised, an input goes to the head that is surer than usual."""
    heads = [{"a": ("x", 12.0), "b": ("y", 0.0)}, {"a": ("x", 10.0), "b": ("z", 1.0)}]
    assert standardised_choice(heads) == [Given("a", "x"), Given("b", "z")]
    same = [{"a": ("x", 3.0), "b": ("y", 0.0)}, {"a": ("x", 3.0), "b": ("y", 1.0)}]
    assert standardised_choice(same)[1] == Given("b", "y")


def test_a_quick_run_does_not_call_itself_all_methods(table, out):
    assert table["title"] == "Some methods on the same rows" and "all static merges" not in table["question"]
    assert "task_arithmetic and tsv_m" in table["question"] and "smile_1" in table["question"]
    words = " ".join(table["sentences"])
    assert "The best of 2 static merges" in words and "The routed peer without the task's name is smile_1" in words
    assert "All methods" not in (out / "methods" / "report.md").read_text()


def test_a_second_run_computes_nothing_and_gives_the_same_rows(table, suite, out, bundle, recipe, monkeypatch):
    monkeypatch.setattr(compared, "_run", lambda *_: pytest.fail("computed again"))
    monkeypatch.setattr(compared, "_run_mass", lambda *_: pytest.fail("computed again"))
    settings = StudySettings(quick=True)
    again = open_studies([STUDIES["methods"]], suite, out, settings, bundle=bundle, recipe=recipe).context
    base = Bundle(bundle, check=False).base_bytes
    assert [row.plain(base) for row in method_rows(again, [])] == table["rows"]


def test_the_report_names_every_method_and_how_it_was_measured(table, out):
    text = (out / "methods" / "report.md").read_text()
    assert all(f"| {row['method']} |" in text for row in table["rows"])
    assert (out / "methods" / "report.html").is_file() and "How it was measured" in text


def test_a_scale_is_the_one_that_does_best_on_validation_rows(context, recipe, tmp_path):
    found = StaticMerge(context, "task_arithmetic")
    scale, chosen = found.scale
    means = {}
    for candidate in (0.1, 0.3, scale):
        found.set_scale(candidate)
        given = shares(context.validation, lambda x, task: found.model.predict(x, task=task)[0])
        means[candidate] = sum(given.values()) / len(given)
    found.remove()
    assert chosen and means[scale] == max(means.values())


def test_without_a_validation_split_the_scale_is_the_published_one(suite, bundle, recipe, tmp_path):
    settings = StudySettings(split="validation")
    same = open_studies([STUDIES["methods"]], suite, tmp_path, settings, bundle=bundle, recipe=recipe).context
    assert StaticMerge(same, "task_arithmetic").scale == (0.3, False)


def test_a_merge_is_removed_when_its_answers_are_known(table, out):
    assert list((out / "cache" / "bundles").iterdir()) == []


# More and more tasks


def test_scaling_measures_each_merge_on_its_own_tasks(suite, out, bundle, recipe, context, table, tmp_path):
    rows = run("scaling", suite, out, bundle, recipe)["rows"]
    assert sorted({row["tasks_merged"] for row in rows}) == [2, 3]
    two = [row for row in rows if row["tasks_merged"] == 2]
    assert {row["method"] for row in two} == {"mass", "task_arithmetic", "tsv_m"}
    assert all(set(row["tasks"]) == {"a", "b"} for row in two)
    small = merge(subset(Recipe.load(recipe), ["a", "b"]), tmp_path / "two", folder=recipe.parent)
    model = massmerge.load(small)
    expected = shares(context, lambda x, task: model.predict(x)[0])
    mass = next(row for row in two if row["method"] == "mass")
    assert mass["tasks"] == {task: expected[task] for task in ("a", "b")}
    whole = next(row for row in rows if row["tasks_merged"] == 3 and row["method"] == "mass")
    assert whole["tasks"] == rows_of(table)["mass"]["task_unknown"]["tasks"]


def test_the_numbers_of_tasks_go_from_two_to_all_in_at_most_eight_steps():
    class Context:
        def __init__(self, tasks, quick=False):
            self.tasks, self.settings = ["t"] * tasks, StudySettings(quick=quick)

    assert counts(Context(8)) == [2, 3, 4, 5, 6, 7, 8]
    assert counts(Context(20))[0] == 2 and counts(Context(20))[-1] == 20 and len(counts(Context(20))) == 8
    assert counts(Context(8, quick=True)) == [2, 8] and counts(Context(1)) == [1]


def test_labels_that_are_shared_with_a_task_that_is_not_merged_are_left_out():
    recipe = Recipe.parse(
        "base: b\ntasks: [{name: a, expert: a}, {name: b, expert: b}, {name: c, expert: c}]\n"
        "shared_labels: [[a/x, b/x, c/x], [a/y, c/y]]"
    )
    assert subset(recipe, ["a", "b"]).shared_labels == [["a/x", "b/x"]]


# A task left out


def test_a_lent_head_reads_the_dense_model_of_the_task_that_an_input_is_routed_to(bundle, recipe):
    folder = bundle.parent
    others = merge(subset(Recipe.load(recipe), ["b", "c"]), folder / "others", folder=folder)
    answering = open_answering(open_recipe(Recipe.load(recipe), folder, download=False))
    model = LentHead(massmerge.load(others), answering, "a")
    texts = ["win free prize", "vote law", "sad film"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    for text, (free, given) in zip(texts, model.outcomes(texts, ["a"] * 3), strict=True):
        selected = massmerge.load(others).route(text)[0].selected
        dense = dense_expert(others, "bert", selected, "a")
        with torch.inference_mode():
            logits = dense(**tokenizer(text, return_tensors="pt")).logits[0]
        assert free.task is None and given.task == "a"
        assert given.logit == pytest.approx(float(logits.max()), abs=1e-4)
    shutil.rmtree(others)


def test_a_task_is_left_out_of_the_merge_and_told_to_the_head(suite, out, bundle, recipe, context, tmp_path):
    found = run("leave_one_out", suite, out, bundle, recipe)
    rows = rows_of(found)
    assert set(rows) == {"base", "task_arithmetic", "tsv_m", "mass", "experts"}
    assert all(set(row["tasks"]) == {"a"} and row["head"] == "given" for row in rows.values())
    without = with_scale(static_recipe(Recipe.load(recipe), "task_arithmetic", ["b", "c"]), 0.3)
    model = StaticModel(merge(without, tmp_path / "out", folder=recipe.parent))
    answering = open_answering(open_recipe(Recipe.load(recipe), recipe.parent, download=False))
    answering.base.load_state_dict(model.backbone.state_dict())
    data = context.ready.data["a"]
    right = 0
    for i, label in enumerate(data.labels):
        batch = next(answering.batches([data.inputs[i]], 1))
        with torch.inference_mode():
            output = answering.base(**answering.call(batch))
        right += answering.answers(output, batch, ["a"])[0].label == label
    assert rows["task_arithmetic"]["tasks"]["a"] == right / len(data)
    assert "is given" in " ".join(found["sentences"])
    page = (out / "leave_one_out" / "report.md").read_text()
    assert "mean over the tasks" not in page + json.dumps(found), "there is one"
    assert "| merged without the task, by | a | normalised |" in page and "leaves out one task, a" in page
