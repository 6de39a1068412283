"""MASS's own studies against bundles that are set as each row says and simply evaluated."""

import json
import sys

import pytest
import torch
import yaml

import massmerge
from massmerge import InputError, MassError
from massmerge.evaluation.data import batches_of_one_task
from massmerge.evaluation.metrics import given_of
from massmerge.evaluation.prepared import prepare_evaluation
from massmerge.evaluation.suite import join_labels
from massmerge.model.answers import Routing, make_prediction
from massmerge.recipe import AnswerOptions, Redundancy
from massmerge.research.studies import STUDIES
from massmerge.research.studies.batch import ALL_INPUTS, PROBES
from massmerge.research.studies.book import AnswerBook, BestOfHead, choose
from massmerge.research.studies.fixed import accepted_tasks, fixed_pass
from massmerge.research.studies.opening import open_studies
from massmerge.research.studies.run import run_studies
from massmerge.research.studies.settings import StudySettings
from models import with_options
from study_suite import study_bundle, write_study_suite

OWN = ("layers", "routers", "redundancy", "sweep", "ablation", "batch")


@pytest.fixture(scope="module")
def bundle(root):
    return study_bundle(root)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return write_study_suite(tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("studies")


@pytest.fixture(scope="module")
def everything(suite, bundle, out):
    """Every study of this file, run once as `mass study all --quick --search` would."""
    settings = StudySettings(quick=True, options={"search": True, "trials": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("massmerge.research.studies.run.STUDIES", {name: STUDIES[name] for name in OWN})
        results = run_studies("all", suite, out, bundle=bundle, recipe=bundle.parent / "recipe.yaml", settings=settings)
    return {result.study.name: result for result in results}


@pytest.fixture(scope="module")
def context(suite, bundle, out):
    return open_studies([STUDIES["layers"]], suite, out, StudySettings(quick=True), bundle=bundle).context


@pytest.fixture
def no_plots(monkeypatch):
    """Drawing takes longer than tiny models."""
    monkeypatch.setattr("massmerge.research.studies.result.write_report", lambda *args: None)


def rows_of(result, **wanted):
    return [row for row in result.finding.rows if all(row.get(key) == value for key, value in wanted.items())]


def naive(bundle, folder, suite, **sections):
    """What `mass eval` finds with a bundle whose recipe says so."""
    return massmerge.evaluate(with_options(bundle, folder, **sections), suite, oracle=False)


def figures(found, name):
    return {task.task: pytest.approx(getattr(task, name).value) for task in found.tasks}


# Naive twins


@pytest.mark.parametrize("score", ["l1", "mahalanobis", "energy"])
def test_a_score_of_the_routers_study_is_that_of_a_bundle(everything, bundle, suite, tmp_path, score):
    found = naive(bundle, tmp_path / "b", suite, router={"score": score})
    (row,) = rows_of(everything["routers"], kind=f"base {score}", sites="vote")
    assert row["routing"]["tasks"] == figures(found, "routing")
    assert row["answers"]["tasks"] == figures(found, "shared")
    assert 0 < row["routing"]["mean"] < 1


@pytest.mark.parametrize("kind", ["prototype", "nearest"])
def test_a_fitted_router_of_the_study_is_that_of_a_calibrated_bundle(
    everything, context, bundle, suite, tmp_path, kind
):
    from massmerge.model.calibrate import calibrate

    calibrated = with_options(bundle, tmp_path / "b")
    prepared = prepare_evaluation(bundle, suite, split="validation", limit=16)
    inputs = {}
    for task, data in prepared.data.items():
        data.read_inputs()
        inputs[task] = [data.inputs[i] for i in range(len(data))]
    calibrate(calibrated, inputs, kind=kind)
    found = massmerge.evaluate(calibrated, suite, oracle=False)
    (row,) = rows_of(everything["routers"], kind=kind, sites="vote")
    assert row["routing"]["tasks"] == figures(found, "routing")


@pytest.fixture(scope="module")
def fixed_bundle(bundle, tmp_path_factory):
    """The experts merged with a fixed model, at the ranks that the bundle has without one."""
    folder = tmp_path_factory.mktemp("fixed")
    recipe = yaml.safe_load((bundle.parent / "recipe.yaml").read_text())
    recipe["merge"] = {"rank": 12, "redundancy": {"threshold": 0.0}}
    for first_pass in ("base", "fixed"):
        recipe["router"] = {"first_pass": first_pass}
        (folder / f"{first_pass}.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        massmerge.merge(folder / f"{first_pass}.yaml", folder / first_pass, folder=bundle.parent)
    return folder


def test_a_fixed_model_made_from_factors_is_the_one_that_a_merge_writes(fixed_bundle, suite, tmp_path):
    plain = open_studies([STUDIES["layers"]], suite, tmp_path, StudySettings(), bundle=fixed_bundle / "base").context
    accepted = accepted_tasks(plain, Redundancy(threshold=0.0))
    first = fixed_pass(plain, accepted, plain.model.stages.voters)
    merged = open_studies([STUDIES["layers"]], suite, tmp_path, StudySettings(), bundle=fixed_bundle / "fixed").context
    batch = plain.model.core.batch([plain.row(sample) for sample in plain.samples[:8]])
    for ours, theirs in zip(first(batch), merged.model.stages.first.first_pass(batch), strict=True):
        torch.testing.assert_close(ours.rows, theirs.rows, atol=2e-4, rtol=2e-4)


def test_the_filter_leaves_out_what_it_leaves_out_of_a_bundle(fixed_bundle, suite, tmp_path):
    plain = open_studies([STUDIES["layers"]], suite, tmp_path, StudySettings(), bundle=fixed_bundle / "base").context
    opened = massmerge.Bundle(fixed_bundle / "fixed")
    kept = accepted_tasks(plain, Redundancy(threshold=0.0))
    stored = opened.statistics["accepted"].bool()
    for row, name in enumerate(opened.ranks):
        assert kept[name] == stored[row].nonzero().flatten().tolist()


def test_through_the_fixed_model_the_study_routes_as_a_bundle_with_it(
    fixed_bundle, suite, tmp_path, monkeypatch, no_plots
):
    monkeypatch.setattr("massmerge.research.studies.redundancy._QUICK", (0.0, 0.9))
    (result,) = run_studies(
        "redundancy", suite, tmp_path, bundle=fixed_bundle / "base", settings=StudySettings(quick=True)
    )
    (row,) = rows_of(result, filter="cosine", threshold=0.0)
    found = massmerge.evaluate(fixed_bundle / "fixed", suite, oracle=False)
    assert row["vote"]["tasks"] == figures(found, "routing")
    assert 0 < row["left_out"] < 1
    assert row["left_out_tasks"]["a"] == 0.0  # the first of the recipe is never left out
    assert rows_of(result, filter="none")[0]["left_out"] == 0.0


@pytest.mark.parametrize(("threshold", "top_k", "score"), [(0.2, 1, "logit"), (0.1, 3, "logit_and_weight")])
def test_a_cell_of_the_sweep_is_a_bundle_with_that_setting(
    everything, bundle, suite, tmp_path, threshold, top_k, score
):
    options = {"router": {"threshold": threshold, "top_k": top_k}, "answer": {"score": score}}
    found = naive(bundle, tmp_path / "b", suite, **options)
    (row,) = rows_of(everything["sweep"], threshold=threshold, top_k=top_k, score=score)
    assert row["tasks"] == figures(found, "shared")
    sizes = found.set_sizes
    assert len({row["mean"] for row in everything["sweep"].finding.rows}) > 2
    assert row["set"] == pytest.approx(sum(size * n for size, n in sizes.items()) / sum(sizes.values()), abs=1e-4)


@pytest.mark.parametrize("merge", ["plain", "weighted"])
def test_a_merge_of_the_ablation_is_a_bundle_with_that_merge(everything, bundle, suite, tmp_path, merge):
    found = naive(bundle, tmp_path / "b", suite, router={"top_k": 3}, answer={"merge": merge})
    (row,) = rows_of(everything["ablation"], merge=merge, top_k=3, score="logit")
    assert row["tasks"] == figures(found, "shared")


def test_ranks_of_the_ablation_are_bundles_of_the_recipe(everything, bundle, suite, tmp_path):
    budget, paper = rows_of(everything["ablation"], part="rank")
    assert (budget["rule"], paper["rule"]) == ("budget: 2.0", "rank: 1/T")
    recipe = yaml.safe_load((bundle.parent / "recipe.yaml").read_text())
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "merge": {"rank": "1/T"}}, sort_keys=False))
    massmerge.merge(tmp_path / "recipe.yaml", tmp_path / "b", folder=bundle.parent)
    found = massmerge.evaluate(tmp_path / "b", suite)
    assert paper["bytes"] == massmerge.Bundle(tmp_path / "b").counted_bytes
    assert paper["tasks"] == figures(found, "shared")
    assert paper["known"]["tasks"] == figures(found, "known")
    assert paper["routing"]["tasks"] == figures(found, "routing")


def test_a_shared_decision_is_that_of_predict(everything, bundle, suite):
    """Batches of one task answered by `predict(route="batch")`, whose first four inputs decide."""
    ready = prepare_evaluation(bundle, suite)
    for data in ready.data.values():
        data.read_inputs()
    model = massmerge.load(bundle)
    right = dict.fromkeys(ready.data, 0)
    for batch in batches_of_one_task(ready.counts, 16, 0):
        answers = model.predict([ready.data[task].inputs[place] for task, place in batch], route="batch")
        for (task, place), answer in zip(batch, answers, strict=True):
            right[task] += (answer.task, answer.label) == (task, ready.data[task].labels[place])
    (row,) = rows_of(everything["batch"], size=16, decides=PROBES)
    assert row["answers"]["tasks"] == {t: pytest.approx(n / len(ready.data[t])) for t, n in right.items()}
    assert len({row["answers"]["mean"] for row in everything["batch"].finding.rows}) > 1


def test_a_batch_of_one_is_a_decision_for_each_input(everything, bundle, suite):
    found = massmerge.evaluate(bundle, suite, oracle=False)
    for decides in (ALL_INPUTS, PROBES):
        (row,) = rows_of(everything["batch"], size=1, decides=decides)
        assert row["routing"]["tasks"] == figures(found, "routing")
        assert row["answers"]["tasks"] == figures(found, "shared")


# Answers


@pytest.mark.parametrize("score", ["logit", "logit_and_weight", "probability"])
def test_the_answer_of_a_set_is_chosen_as_in_predict(score):
    generator = torch.Generator().manual_seed(0)
    options = AnswerOptions(score=score, weight=0.7)
    labels = {"a": ("x", "y"), "b": ("x", "y", "z"), "c": ("w",), "d": ("t", "u")}
    problems = dict(
        zip(labels, ["single_label_classification"] * 2 + ["regression", "multi_label_classification"], strict=True)
    )
    for _ in range(20):
        logits = {task: torch.randn(len(names), generator=generator) for task, names in labels.items()}
        weights = dict(zip(labels, torch.rand(4, generator=generator).tolist(), strict=True))
        best = make_prediction(logits, labels, problems, weights, options, 1)
        heads = {}
        for task, values in logits.items():
            at = int(values.argmax())
            share = None if task == "c" else float((values.sigmoid() if task == "d" else values.softmax(0))[at])
            label = labels[task][at]
            if task == "d":
                label = join_labels(name for name, value in zip("tu", values, strict=True) if value > 0)
            heads[task] = BestOfHead(label, float(values[at]), share)
        found, expected = choose(heads, weights, options, problems), given_of(best)
        assert found[:2] == expected[:2]
        assert found.score == pytest.approx(expected.score) or expected.label == ""


def test_answers_by_a_given_routing_are_those_of_predict(bundle):
    model = massmerge.load(bundle)
    inputs = ["call", "vote law", "sad film team", "good", "win free prize"]
    expected = model.predict(inputs)
    found = model.answer(inputs, [p.routing for p in expected], batch_size=2)
    assert [(p.task, p.label, p.logit) for p in found] == [
        (p.task, p.label, pytest.approx(p.logit, abs=1e-5)) for p in expected
    ]
    assert len({p.task for p in found}) > 1
    given = model.answer(inputs[:1], [Routing({}, {"c": 1.0}, ["c"], "")])
    assert given[0].label == model.predict(inputs[0], task="c")[0].label
    with pytest.raises(InputError, match="no task 'tone'"):
        model.answer(inputs[:1], [Routing({}, {"tone": 1.0}, ["tone"], "")])


def test_an_answer_is_computed_once_whatever_asks_for_it(context, monkeypatch):
    book = AnswerBook(context, context.model)
    routings = [Routing({}, {"a": 1.0}, ["a"], ""), Routing({}, {"a": 0.6, "c": 0.4}, ["c", "a"], "")]
    first = book.heads([0, 1], routings)
    assert [sorted(heads) for heads in first] == [["a"], ["a", "c"]]
    monkeypatch.setattr(massmerge.Model, "answer", None)
    assert AnswerBook(context, context.model).heads([0, 1], routings) == first


# All of them


def test_every_study_writes_its_folder_and_all_writes_one_report(everything, out):
    assert list(everything) == list(OWN)
    for name in everything:
        folder = out / name
        assert {"report.md", "report.html", "result.json"} <= {p.name for p in folder.iterdir()}
        assert list(folder.glob("*.png"))
    page = (out / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == sum(len(list((out / name).glob("*.png"))) for name in everything)
    assert 'src="http' not in page
    text = (out / "report.md").read_text()
    for words in ("## Who won", "## What was measured", "## How it was measured", "## layers: ", "## batch: "):
        assert words in text


def test_where_mass_does_not_win_the_report_says_so_and_why(everything, out):
    text = (out / "report.md").read_text()
    lost = [name for name, result in everything.items() if not result.finding.verdict.won]
    assert lost, "random weights: MASS cannot win everything"
    section = text.partition("## Where MASS does not win")[2].partition("\n## ")[0]
    for name in lost:
        (line,) = [line for line in section.splitlines() if line.startswith(f"- {name}: ")]
        assert everything[name].finding.verdict.why in line
        assert everything[name].finding.verdict.why


def test_a_second_run_computes_nothing_and_finds_the_same(everything, suite, bundle, out, monkeypatch, no_plots):
    monkeypatch.setattr("massmerge.research.studies.scores._score", None)
    monkeypatch.setattr(massmerge.Model, "answer", None)
    settings = StudySettings(quick=True, options={"search": True, "trials": 4})
    recipe = bundle.parent / "recipe.yaml"
    for name in ("sweep", "redundancy"):
        (again,) = run_studies(name, suite, out, bundle=bundle, recipe=recipe, settings=settings if name == "sweep" else
                               StudySettings(quick=True))  # fmt: skip
        assert json.dumps(again.finding.rows) == json.dumps(everything[name].finding.rows)
        assert again.finding.verdict == everything[name].finding.verdict


def test_a_search_tries_the_default_first_and_confirms_the_best_on_other_rows(everything):
    trials = rows_of(everything["sweep"], split="validation")
    assert [row["trial"] for row in trials] == [0, 1, 2, 3]
    assert (trials[0]["threshold"], trials[0]["top_k"], trials[0]["site"]) == (0.2, 1, "vote")
    verdict = everything["sweep"].finding.verdict
    assert verdict.mass == "defaults"
    assert verdict.mass_value == rows_of(everything["sweep"], threshold=0.2, top_k=1, score="logit")[0]["mean"]


def test_a_search_elsewhere_or_without_optuna_or_rows_is_refused(suite, bundle, tmp_path, monkeypatch):
    settings = StudySettings(options={"search": True})
    with pytest.raises(InputError, match="--search belongs to the study sweep"):
        run_studies("layers", suite, tmp_path, bundle=bundle, settings=settings)
    single = StudySettings(split="validation", options={"search": True})
    with pytest.raises(InputError, match="study sweep: it needs rows of the split 'validation'"):
        run_studies("sweep", suite, tmp_path, bundle=bundle, settings=single)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MassError, match="pip install 'massmerge"):
        run_studies("sweep", suite, tmp_path, bundle=bundle, settings=settings)
