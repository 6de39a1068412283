"""Suites of tasks whose rows have several labels, or a number."""

import json

import numpy as np
import pytest
from pyarrow import parquet

import massmerge
from massmerge import InputError
from massmerge.evaluation.metrics import Given, shared_groups, statistic
from massmerge.evaluation.suite import Suite, join_labels
from problem_types import TEXTS, made


def micro_f1(truths, given, groups=()):
    truth = [join_labels(labels) for labels in truths]
    answers = [Given(task, join_labels(labels)) for task, labels in given]
    return statistic("micro_f1", "t", truth, answers, shared_groups(groups))(np.arange(len(truths)))


def test_micro_f1_counts_every_pair_of_task_and_label():
    truths = [["a", "b"], ["a"], [], ["c"]]
    given = [("t", ["a"]), ("t", ["a", "c"]), ("t", []), ("other", ["c"])]
    # hits: a, a; too many: c, other/c; missed: b, c
    assert micro_f1(truths, given) == pytest.approx(2 * 2 / (2 * 2 + 2 + 2))
    assert micro_f1(truths, [("t", labels) for labels in truths]) == 1.0
    assert micro_f1([["a"]], [(None, [])]) == 0.0


def test_a_shared_label_of_another_task_is_a_hit():
    assert micro_f1([["a", "b"]], [("other", ["x"])], [["t/a", "other/x"]]) == pytest.approx(2 * 1 / (2 + 1))


def write_suite(folder, topic, task=None):
    (folder / "topic.jsonl").write_text("".join(json.dumps({"text": t, "label": row}) + "\n" for t, row in topic))
    (folder / "stars.csv").write_text("text,label\n" + "".join(f"{t},{i / 2}\n" for i, t in enumerate(TEXTS)))
    tasks = {
        "topic": {"data": "topic.jsonl", "input": "text", **(task or {})},
        "spam": {"data": "stars.csv", "input": "text"},
    }
    (folder / "suite.yaml").write_text(json.dumps({"tasks": tasks}))
    return folder / "suite.yaml"


SETS = [["politics", "arts"], [], ["sports"], ["arts", "science", "sports"], ["politics"], ["science"]]


def test_a_suite_with_sets_of_labels_is_measured_by_micro_f1_and_normalised_by_the_expert_s(root, tmp_path):
    folder = made(root)
    suite = write_suite(tmp_path, list(zip(TEXTS, SETS, strict=True)))
    report = tmp_path / "report"
    found = massmerge.evaluate(folder / "bundle", suite, experts=True, folder=folder, report=report)
    topic, spam = found.tasks
    assert (topic.metric, spam.metric) == ("micro_f1", "spearman")
    model = massmerge.load(folder / "bundle")
    known = [(p.task, p.labels) for p in model.predict(TEXTS, task="topic")]
    expected = statistic(
        "micro_f1", "topic", [join_labels(s) for s in SETS], [Given(t, join_labels(s)) for t, s in known]
    )
    assert topic.known.value == pytest.approx(expected(np.arange(len(SETS))))
    assert 0 < topic.reference <= 1
    assert topic.normalised.value == pytest.approx(topic.strict.value / topic.reference)
    rows = parquet.read_table(report / "predictions.parquet").to_pylist()
    assert {row["label"] for row in rows if row["task"] == "topic"} >= {"arts, politics", "", "arts, science, sports"}
    assert "micro_f1" in (report / "report.md").read_text()


@pytest.mark.parametrize("value", ["politics, arts", ["arts", "politics", "arts"], ["3", "0"], [3, 0.0]])
def test_labels_of_a_row_are_a_list_or_a_text_with_separators(root, tmp_path, value):
    names = None if "arts" in str(value) else {"labels": ["politics", "sports", "science", "arts"]}
    suite = write_suite(tmp_path, [(TEXTS[0], value)], names)
    found = massmerge.evaluate(made(root) / "bundle", suite, tasks=["topic"])
    assert found.results[0].label == join_labels(["arts", "politics"])


def test_a_separator_can_be_told(root, tmp_path):
    suite = write_suite(tmp_path, [(TEXTS[0], "politics|arts")], {"separator": "|"})
    found = massmerge.evaluate(made(root) / "bundle", suite, tasks=["topic"])
    assert found.results[0].label == join_labels(["arts", "politics"])


def test_a_label_that_the_head_does_not_know_is_named(root, tmp_path):
    suite = write_suite(tmp_path, [(TEXTS[0], ["politics", "food"])])
    with pytest.raises(InputError, match=r"does not know 1 of the data's labels, such as 'food'"):
        massmerge.evaluate(made(root) / "bundle", suite)


@pytest.mark.parametrize(
    ("task", "metric", "words"),
    [
        ("topic", "accuracy", "its head is a multi_label_classification, which `metric: micro_f1` is for"),
        ("spam", "f1", "its head is a regression, which `metric: spearman` is for"),
        ("mood", "micro_f1", "is for multi-label heads"),
    ],
)
def test_a_metric_that_does_not_fit_the_head_is_refused(task, metric, words):
    problems = {"topic": "multi_label_classification", "spam": "regression", "mood": "single_label_classification"}
    suite = Suite.parse(json.dumps({"tasks": {task: {"data": "x.csv", "input": "text", "metric": metric}}}))
    with pytest.raises(InputError, match=f"task {task}: .*{words}"):
        suite.fitting(problems)


def test_sequences_of_class_labels_have_the_names_of_the_dataset(root, tmp_path):
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["politics", "sports", "science", "arts"])
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.Sequence(names)})
    rows = datasets.Dataset.from_dict({"text": TEXTS[:2], "label": [[3, 0], []]}, features=features)
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "saved")
    suite = tmp_path / "suite.yaml"
    suite.write_text("tasks:\n  topic: {dataset: saved, input: text}\n")
    found = massmerge.evaluate(made(root) / "bundle", suite)
    assert {row.label for row in found.results} == {join_labels(["arts", "politics"]), ""}
