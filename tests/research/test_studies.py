"""Studies: what is refused before anything is computed, what is kept, and that figures repeat."""

import json

import pytest
from click.testing import CliRunner

import massmerge
from massmerge import InputError
from massmerge.cli.main import main
from massmerge.research.studies import STUDIES
from massmerge.research.studies.cells import Cells, checksum
from massmerge.research.studies.figures import summarize
from massmerge.research.studies.opening import open_studies
from massmerge.research.studies.result import verdict_words
from massmerge.research.studies.run import run_studies
from massmerge.research.studies.settings import StudySettings
from massmerge.research.studies.study import Study, Verdict
from models import with_options
from study_suite import study_bundle, write_study_suite


@pytest.fixture(scope="module")
def bundle(root):
    return study_bundle(root)


@pytest.fixture(scope="module")
def recipe(bundle):
    return bundle.parent / "recipe.yaml"


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return write_study_suite(tmp_path_factory.mktemp("suite"))


@pytest.fixture
def no_plots(monkeypatch):
    """Drawing takes longer than tiny models."""
    monkeypatch.setattr("massmerge.research.studies.result.write_report", lambda *args: None)


def context_of(suite, bundle, out, **more):
    settings = StudySettings(**{key: more.pop(key) for key in list(more) if key in StudySettings.__dataclass_fields__})
    return open_studies([STUDIES["layers"]], suite, out, settings, bundle=bundle, **more).context


# Cells


def test_a_cell_is_computed_once_for_the_same_bundle_rows_and_options(suite, bundle, tmp_path):
    calls = []

    def value(n):
        return lambda: calls.append(n) or {"n": n}

    context = context_of(suite, bundle, tmp_path)
    assert context.cell("x", {"a": 1}, value(1)) == {"n": 1}
    assert context.cell("x", {"a": 1}, value(2)) == {"n": 1}
    assert context.cell("x", {"a": 2}, value(3)) == {"n": 3}
    again = context_of(suite, bundle, tmp_path)
    assert again.cell("x", {"a": 1}, value(4)) == {"n": 1}
    fewer = context_of(suite, bundle, tmp_path, limit=3)
    assert fewer.cell("x", {"a": 1}, value(5)) == {"n": 5}
    assert calls == [1, 3, 5]


def test_another_bundle_has_other_cells(suite, bundle, tmp_path):
    other = with_options(bundle, tmp_path / "other", router={"threshold": 0.5})
    first, second = (context_of(suite, path, tmp_path / "out") for path in (bundle, other))
    assert first.key("x", {}) != second.key("x", {})


def test_a_line_that_was_cut_off_is_passed_over_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "cells.jsonl"
    cells = Cells(path)
    cells.put("a", [1], 0.5)
    cells.put("b", [2])
    path.write_bytes(path.read_bytes()[:-9])
    again = Cells(path)
    assert "a" in again and "b" not in again
    assert again.seconds("a") == 0.5
    again.put("b", [3])
    third = Cells(path)
    assert (third["a"], third["b"]) == ([1], [3])


def test_a_first_run_sees_what_a_resumed_one_will(tmp_path):
    assert Cells(tmp_path / "cells.jsonl").put("a", {1: (2, 3)}) == {"1": [2, 3]}


def test_checksums_do_not_depend_on_the_order_of_keys():
    assert checksum({"a": 1, "b": [2]}) == checksum({"b": [2], "a": 1}) != checksum({"a": 1, "b": [3]})


# Figures and verdicts


def test_a_mean_is_over_tasks_and_its_margin_is_of_their_rows():
    found = summarize({"a": 0.5, "b": 1.0}, {"a": 100, "b": 10}, {"a": 0.5, "b": 0.8})
    assert found.mean == 0.75
    assert found.deviation == pytest.approx(0.35355, abs=1e-4)
    assert found.margin == pytest.approx(1.96 * 0.05 / 2, abs=1e-4)
    assert found.normalised == pytest.approx((1 + 1.25) / 2)
    assert summarize({"a": 0.5, "b": 1.0}, {"a": 1, "b": 1}, {"a": 0.5}).normalised is None


def verdict_of(**changes):
    values = {"measure": "accuracy", "best": "other", "best_value": 0.9, "mass": "default", "mass_value": 0.8,
              "margin": 0.02, "why": "Two tasks look alike."} | changes  # fmt: skip
    return Verdict(**values)


def test_a_verdict_says_who_won_and_where_mass_did_not_why():
    assert verdict_words(verdict_of(mass_value=0.95)) == "MASS (default) is the best: accuracy 95.0 %."
    lost = verdict_words(verdict_of())
    assert lost == "other is the best: accuracy 90.0 %, MASS (default) 80.0 %, 10.0 points less. Two tasks look alike."
    assert "within the margin of 2.0 points" in verdict_words(verdict_of(mass_value=0.89))


# What is refused


def refused(suite, **options):
    with pytest.raises(InputError) as error:
        run_studies("layers", suite, **options)
    return str(error.value)


@pytest.fixture
def no_computing(monkeypatch):
    """Fail where a bundle is loaded or merged."""

    def fail(*args, **kwargs):
        raise AssertionError("something was computed")

    monkeypatch.setattr("massmerge.research.studies.context.load", fail)
    monkeypatch.setattr("massmerge.research.studies.context.merge", fail)


def write_suite(folder, text):
    (folder / "suite.yaml").write_text(text)
    return folder / "suite.yaml"


def test_wrong_suites_are_refused_by_name_before_anything_is_computed(suite, bundle, recipe, tmp_path, no_computing):
    (tmp_path / "spam.csv").write_text("text,label\ncall now,junk\n")
    (tmp_path / "none.csv").write_text("text,label\n")
    row = "tasks:\n  a: {data: %s, input: text}\n"
    options = {"out": tmp_path / "out", "bundle": bundle}
    assert "task a" in (text := refused(write_suite(tmp_path, row % "spam.csv"), **options)) and "'junk'" in text
    assert "none.csv: has no rows" in refused(write_suite(tmp_path, row % "none.csv"), **options)
    assert "there.csv" in refused(write_suite(tmp_path, row % "there.csv"), **options)
    unknown = write_suite(tmp_path, "tasks:\n  cars: {data: spam.csv, input: text}\n")
    assert "no task 'cars'" in refused(unknown, **options)
    assert "no task 'cars'" in refused(unknown, out=tmp_path / "out", recipe=recipe)
    assert "a-train.csv" in refused(suite, **options, settings=StudySettings(split="train"))
    assert not (tmp_path / "out").exists()


def test_a_study_without_a_bundle_a_recipe_or_a_known_name_is_refused(suite, bundle, recipe, tmp_path, no_computing):
    assert "--bundle out/ or --recipe" in refused(suite)
    with pytest.raises(InputError, match=r"no study 'layer'\. Choose from methods, layers"):
        run_studies("layer", suite, bundle=bundle)
    other = tmp_path / "recipe.yaml"
    other.write_text(recipe.read_text().replace("expert: ", f"expert: {recipe.parent}/").replace("name: c", "name: tone")
                     .replace("base: base", f"base: {recipe.parent}/base"))  # fmt: skip
    assert "are not those of the recipe (a, b, tone)" in refused(suite, bundle=bundle, recipe=other)


def test_a_study_that_reads_experts_or_other_rows_says_so(suite, bundle, tmp_path, no_computing):
    def study(**needs):
        return Study("x", "X", "?", lambda context: None, lambda context: 0.0, **needs)

    def error_of(*studies, given=suite):
        with pytest.raises(InputError) as error:
            open_studies(list(studies), given, tmp_path / "out", StudySettings(), bundle=bundle)
        return str(error.value)

    (tmp_path / "spam.csv").write_text("text,label\ncall,LABEL_0\n")
    single = write_suite(tmp_path, "tasks:\n  a: {data: spam.csv, input: text}\n")
    assert error_of(study(needs_recipe=True)).startswith("study x: it reads the experts, which --recipe")
    assert "study x: it needs rows of the split 'validation'" in error_of(study(needs_validation=True), given=single)
    opened = open_studies(
        [study(needs_validation=True), STUDIES["layers"]], single, tmp_path / "out", StudySettings(), bundle=bundle
    )
    assert [one.name for one in opened.studies] == ["layers"]
    assert list(opened.left_out) == ["x"]


def test_an_input_that_cannot_be_read_is_named(bundle, tmp_path):
    (tmp_path / "spam.csv").write_text("text,label\ncall,LABEL_0\n,LABEL_1\n")
    single = write_suite(tmp_path, "tasks:\n  a: {data: spam.csv, input: text}\n")
    assert "spam.csv:2" in refused(single, out=tmp_path / "out", bundle=bundle)


# Layers


@pytest.fixture(scope="module")
def layers(suite, bundle, tmp_path_factory):
    out = tmp_path_factory.mktemp("layers")
    (result,) = run_studies("layers", suite, out, bundle=bundle, command="mass study layers")
    return out, result


@pytest.mark.parametrize("site", ["A0", "M1", "D1"])
def test_a_site_of_the_study_routes_as_a_bundle_with_that_site_does(layers, suite, bundle, tmp_path, site):
    naive = massmerge.evaluate(with_options(bundle, tmp_path / "one", router={"site": site}), suite, oracle=False)
    row = next(row for row in layers[1].finding.rows if row["site"] == site)
    assert row["tasks"] == {task.task: pytest.approx(task.routing.value) for task in naive.tasks}
    assert row["mean"] == pytest.approx(naive.means["routing"].value)
    assert any(0 < share < 1 for share in row["tasks"].values())  # or any site would pass


def test_the_vote_of_the_study_is_the_bundles(layers, suite, bundle):
    naive = massmerge.evaluate(bundle, suite, oracle=False)
    assert layers[1].finding.rows[-1]["tasks"] == {t.task: pytest.approx(t.routing.value) for t in naive.tasks}
    assert layers[1].finding.verdict.mass_value == pytest.approx(naive.means["routing"].value)


def test_the_folder_holds_figures_words_and_plots(layers):
    folder = layers[0] / "layers"
    assert sorted(p.name for p in folder.iterdir()) == [
        "layers-tasks.png", "layers.png", "report.html", "report.md", "result.json"]  # fmt: skip
    found = json.loads((folder / "result.json").read_text())
    assert found["command"] == "mass study layers"
    assert found["settings"]["split"] == "test" and found["settings"]["seed"] == 0
    assert found["versions"]["massmerge"] == massmerge.__version__
    assert found["machine"] and found["created"]
    assert [row["site"] for row in found["rows"]][:4] == ["A0", "O0", "M0", "D0"]
    text = (folder / "report.md").read_text()
    assert "| vote of the bundle's voters |" in text.replace("**", "")
    assert "![" in text and "date: " in text


def test_a_second_run_computes_nothing_and_finds_the_same(layers, suite, bundle, monkeypatch, no_plots):
    monkeypatch.setattr("massmerge.research.studies.scores._score", None)
    (again,) = run_studies("layers", suite, layers[0], bundle=bundle)
    assert again.finding.rows == layers[1].finding.rows


def test_a_killed_study_goes_on_and_ends_in_the_same_figures(layers, suite, bundle, tmp_path, monkeypatch, no_plots):
    from massmerge.research.studies import scores

    real, done = scores._score, []

    def dies(*args):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(args[-1])
        return real(*args)

    monkeypatch.setattr(scores, "_score", dies)
    with pytest.raises(KeyboardInterrupt):
        run_studies("layers", suite, tmp_path, bundle=bundle)
    done[:] = [""] * 9
    (result,) = run_studies("layers", suite, tmp_path, bundle=bundle)
    assert done[9:] == ["first pass, c", *(f"the bundle's first pass, {task}" for task in "abc")]
    assert result.finding.rows == layers[1].finding.rows
    assert result.finding.verdict == layers[1].finding.verdict


def test_a_recipe_alone_is_merged_once(suite, recipe, bundle, tmp_path):
    first = context_of(suite, None, tmp_path, recipe=recipe)
    when = (first.bundle / "mass.json").stat().st_mtime_ns
    again = context_of(suite, None, tmp_path, recipe=recipe)
    assert again.bundle == first.bundle
    assert (first.bundle / "mass.json").stat().st_mtime_ns == when
    assert massmerge.Bundle(first.bundle).manifest["files"] == massmerge.Bundle(bundle).manifest["files"]


# The command


def run(*arguments):
    return CliRunner().invoke(main, ["study", *map(str, arguments)])


def test_the_command_prints_who_won_and_the_table(suite, bundle, layers, no_plots):
    done = run("layers", suite, "--bundle", bundle, "--out", layers[0])
    assert done.exit_code == 0, done.output
    assert "48 rows, at most about" in done.stderr
    assert "Routing accuracy at every site" in done.stdout
    assert "vote of the bundle's voters" in done.stdout
    assert run("layers", suite, "--bundle", bundle, "--out", layers[0], "-q").output == ""


def test_json_of_the_command_is_the_result(suite, bundle, layers, no_plots):
    done = run("layers", suite, "--bundle", bundle, "--out", layers[0], "--json")
    assert json.loads(done.stdout)["rows"] == json.loads((layers[0] / "layers" / "result.json").read_text())["rows"]
    assert done.stderr == ""


def test_the_list_names_every_study():
    done = run("--list")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*STUDIES, "all"]
    assert [one["name"] for one in json.loads(run("--list", "--json").stdout)] == list(STUDIES)


def test_wrong_calls_end_with_code_2(suite, bundle):
    assert run("layers").exit_code == 2
    done = run("layer", suite, "--bundle", bundle)
    assert done.exit_code == 2 and "no study 'layer'" in done.stderr and done.stdout == ""


def test_quick_takes_a_small_sample(suite, bundle, tmp_path):
    assert context_of(suite, bundle, tmp_path, quick=True).settings.limit == 20
    for limit in (5, 30):
        assert context_of(suite, bundle, tmp_path, quick=True, limit=limit).settings.limit == limit


@pytest.mark.parametrize("name", ["scaling", "ablation"])
def test_a_second_run_in_an_empty_folder_finds_the_same(name, suite, bundle, recipe, tmp_path, no_plots):
    first, second = (
        run_studies(name, suite, tmp_path / str(i), bundle=bundle, recipe=recipe, settings=StudySettings(quick=True))[0]
        for i in range(2)
    )
    assert first.finding.rows == second.finding.rows and first.finding.verdict == second.finding.verdict
