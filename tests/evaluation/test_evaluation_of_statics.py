"""Static merges on a suite: the same stream as bundles, with heads or with texts."""

import csv
import json

import pytest
import yaml
from click.testing import CliRunner

import massmerge
from massmerge import InputError, Recipe, StaticModel
from massmerge.cli.demo.example import make_example, make_writing_example
from massmerge.cli.main import main
from massmerge.evaluation.metrics import plain_text
from massmerge.recipe import MergeOptions

WORDS = ["win a prize", "free money now", "meeting report", "team goal", "law and vote", "so sad a film"]


def write_rows(folder, model, wanted) -> None:
    """Rows of each task whose labels are what `wanted` says, and a suite of them."""
    tasks = {}
    for task in model.tasks:
        with (folder / f"{task}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            rows.writerows((text, wanted(task, text)) for text in WORDS)
        tasks[task] = {"data": f"{task}.csv", "input": "text"}
    suite = {"tasks": tasks, **({"generate": {"max_new_tokens": 4}} if model.writes else {})}
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite))


def merged(folder, recipe, method: str):
    options = MergeOptions.model_validate({"method": method})
    static = Recipe.load(recipe).model_copy(update={"merge": options})
    return massmerge.merge(static, folder / method, folder=folder, workers=1)


def answer_of(model: StaticModel, task: str, text: str) -> str:
    """What a method answers that is told the task."""
    if model.writes:
        return model.generate(text, task=task, max_new_tokens=4)[0].text
    return model.predict(text, task=task)[0].label


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """An average whose own heads, told their task, have every row right."""
    folder = tmp_path_factory.mktemp("labelled")
    recipe = make_example(folder)
    model = StaticModel(merged(folder, recipe, "average"))
    write_rows(folder, model, lambda task, text: model.predict(text, task=task)[0].label)
    merged(folder, recipe, "emr")
    return folder


@pytest.fixture(scope="module")
def writing(tmp_path_factory):
    """An average of models that write, whose own texts are the labels, in capitals."""
    folder = tmp_path_factory.mktemp("writing")
    recipe = make_writing_example(folder)
    model = StaticModel(merged(folder, recipe, "average"))
    write_rows(folder, model, lambda task, text: model.generate(text, max_new_tokens=4)[0].text.upper())
    merged(folder, recipe, "emr")
    return folder


def test_a_static_merge_is_measured_by_the_head_with_the_largest_logit(labelled):
    model = StaticModel(labelled / "average")
    found = massmerge.evaluate(labelled / "average", labelled / "suite.yaml", batch_size=4)
    for result in found.tasks:
        answers = [model.predict(text)[0] for text in WORDS]
        own = [model.predict(text, task=result.task)[0].label for text in WORDS]
        hits = [a.task == result.task and a.label == label for a, label in zip(answers, own, strict=True)]
        assert result.strict.value == pytest.approx(sum(hits) / len(hits))
        assert result.routing.value == pytest.approx(sum(a.task == result.task for a in answers) / len(answers))
        assert result.known.value == 1
    assert found.options["method"] == "average" and found.sizes.bundle == model.nbytes
    assert any("the task whose head has the largest logit" in note for note in found.notes)


def test_a_static_merge_of_writers_is_measured_by_its_texts(writing):
    done = CliRunner().invoke(main, ["eval", str(writing / "average"), str(writing / "suite.yaml"), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {task["strict"]["value"] for task in found["tasks"]} == {1.0}
    assert found["sizes"]["ratio"] == pytest.approx(1, abs=0.1)


def test_what_names_no_task_shows_no_routing(writing, tmp_path):
    out = tmp_path / "report"
    call = ["eval", str(writing / "average"), str(writing / "suite.yaml"), "--report", str(out)]
    done = CliRunner().invoke(main, call)
    assert done.exit_code == 0, done.output
    assert "routed" not in done.stdout and "routing" not in done.stdout
    assert "Routing" not in (out / "report.md").read_text()


@pytest.mark.parametrize("kind", ["labelled", "writing"])
def test_a_method_that_must_be_told_has_figures_with_the_task_known_alone(request, kind):
    folder = request.getfixturevalue(kind)
    found = massmerge.evaluate(folder / "emr", folder / "suite.yaml")
    assert found.means["strict"].value == 0
    model = StaticModel(folder / "emr")
    for result in found.tasks:
        rows = list(csv.DictReader((folder / f"{result.task}.csv").open()))
        told = [answer_of(model, result.task, row["text"]) for row in rows]
        hits = [plain_text(a) == plain_text(row["label"]) for a, row in zip(told, rows, strict=True)]
        assert result.known.value == pytest.approx(sum(hits) / len(hits))
    with pytest.raises(InputError, match="needs the task"):
        massmerge.evaluate(folder / "emr", folder / "suite.yaml", oracle=False)


@pytest.mark.parametrize("options", [{"router": "projection"}, {"route": "batch"}, {"unknown": {"lift": 1.0}}])
def test_what_only_a_bundle_can_do_is_refused(labelled, options):
    with pytest.raises(InputError, match=rf"which does not route\. Leave out {next(iter(options))}"):
        massmerge.evaluate(labelled / "average", labelled / "suite.yaml", **options)


def test_experts_are_not_measured_beside_a_static_merge(labelled):
    with pytest.raises(InputError, match="`mass study methods` shows both"):
        massmerge.evaluate(labelled / "average", labelled / "suite.yaml", experts=True)


def test_a_row_that_cannot_be_read_costs_its_point_and_is_named(labelled, tmp_path):
    (tmp_path / "spam.csv").write_text("text,label\nwin a prize,spam\n,spam\n")
    (tmp_path / "suite.yaml").write_text("tasks: {spam: {data: spam.csv, input: text}}\n")
    found = massmerge.evaluate(labelled / "average", tmp_path / "suite.yaml")
    assert [name.rpartition(":")[2] for name, _ in found.failures] == ["2"]
    assert found.tasks[0].known.value <= 0.5
