"""Suites: the YAML, splits and references."""

from pathlib import Path

import pytest

from massmerge import InputError, Suite
from massmerge.evaluation.suite import SuiteTask, label_text, suite_and_folder

SMALL = "tasks:\n  one: {data: a.csv, input: text}\n"


def fault(text: str) -> str:
    with pytest.raises(InputError) as caught:
        Suite.parse(text, "suite.yaml")
    return str(caught.value)


# The YAML


def test_a_task_needs_data_and_the_column_of_its_inputs():
    task = Suite.parse(SMALL).tasks["one"]
    assert (task.data, task.columns, task.label_column, task.metric, task.reference) == (
        "a.csv", ["text"], "label", "accuracy", None,
    )  # fmt: skip


def test_a_suite_is_called_after_its_file_unless_it_has_a_name(tmp_path):
    (tmp_path / "mail.yaml").write_text(SMALL)
    assert Suite.load(tmp_path / "mail.yaml").name == "mail"
    (tmp_path / "mail.yaml").write_text("name: post\n" + SMALL)
    assert Suite.load(tmp_path / "mail.yaml").name == "post"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            SMALL + "extra: 1",
            "suite.yaml:3: unknown key 'extra' (known here: tasks, name, validation, shared_labels, generate)",
        ),
        (
            "tasks:\n  one:\n    data: a.csv\n    inputs: x",
            "suite.yaml:4: unknown key 'tasks.one.inputs' (known here: data",
        ),
        ("tasks:\n  one: {input: text}", "suite.yaml:2: 'tasks.one': give one of data (a table), folder"),
        ("tasks:\n  one: {data: a.csv, folder: b, input: text}", "give one of data (a table), folder"),
        ("tasks:\n  one: {data: a.csv}", "suite.yaml:2: 'tasks.one': input is missing"),
        ("tasks:\n  one: {data: a.csv, input: [a, b, c]}", "input is one column, or two of them"),
        ("tasks:\n  one: {folder: a, input: x}", "a folder has no columns"),
        (
            "tasks:\n  one: {data: a.csv, input: x, split: test}",
            "split belongs to dataset; for a table or a folder write",
        ),
        (
            "tasks:\n  one: {data: a.csv, input: x, metric: auc}",
            "should be 'accuracy', 'f1', 'micro_f1' or 'spearman' (it is 'auc')",
        ),
        ("tasks:\n  one: {data: a.csv, input: x, reference: 97.5}", "less than or equal to 1"),
        ("tasks:\n  one: {data: a.csv, input: x, reference: 0}", "greater than 0"),
        ("tasks:\n  one: {data: a.csv, input: x, positive: a}", "positive belongs to metric: f1"),
        (SMALL + "shared_labels: [[one, two/a]]", "'one' in shared_labels: write task/label"),
        (SMALL + "  one: {data: b.csv, input: text}", "suite.yaml:3: the key 'one' occurs twice"),
        ("tasks: {}", "suite.yaml:1: 'tasks' is empty; give at least one"),
        ("name: x", "'tasks' is missing"),
        ("tasks:\n  one: {data: a/{split}.csv, input: x}", "suite.yaml:2: not valid YAML"),
        ("- a", "a suite is a mapping with the key tasks"),
    ],
)
def test_a_fault_is_told_with_its_line_and_what_would_be_right(text, message):
    assert message in fault(text)


def test_all_faults_are_told_at_once():
    text = "tasks:\n  one: {data: 3, input: x}\n  two: {data: a.csv, input: x, metric: auc}\nnmae: y"
    assert [line.split(":")[1] for line in fault(text).splitlines()] == ["2", "3", "4"]


def test_a_suite_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.yaml: no such suite"):
        Suite.load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("value", "text"), [(3, "3"), (3.0, "3"), ("3", "3"), (True, "true"), (None, ""), (0.5, "0.5"), ("True", "True")]
)
def test_a_label_is_the_same_however_a_file_holds_it(value, text):
    assert label_text(value) == text


def test_labels_are_mapped_by_a_mapping_or_by_their_number():
    mapped = Suite.parse("tasks: {a: {data: a.csv, input: x, labels: {0: no, 1: yes, good: fine}}}").tasks["a"]
    assert [mapped.head_label(v) for v in (0, "1", "good", "other")] == ["false", "true", "fine", "other"]
    numbered = Suite.parse("tasks: {a: {data: a.csv, input: x, labels: [ham, spam]}}").tasks["a"]
    assert [numbered.head_label(v) for v in (0, "1", 1.0, 2, "spam")] == ["ham", "spam", "spam", "2", "spam"]


# Splits and references


def test_the_split_takes_its_place_in_the_path():
    task = SuiteTask(data="a/{split}.csv", input="x")
    assert (task.place(None), task.place("validation")) == ("a/test.csv", "a/validation.csv")


def test_a_split_that_nothing_can_be_chosen_by_is_refused():
    with pytest.raises(
        InputError, match=r"the split 'validation' was requested, but the path is the same for every split"
    ):
        SuiteTask(data="a.csv", input="x").place("validation")
    with pytest.raises(InputError, match=r"the suite sets split: test"):
        SuiteTask(dataset="me/d", split="test", input="x").place("validation")


def test_a_reference_is_of_the_test_split_unless_it_is_given_for_each():
    one = SuiteTask(data="a", input="x", reference=0.9)
    each = SuiteTask(data="a", input="x", reference={"validation": 0.8, "test": 0.9})
    assert [one.reference_of(s) for s in (None, "test", "validation")] == [0.9, 0.9, None]
    assert [each.reference_of(s) for s in (None, "test", "validation", "train")] == [0.9, 0.9, 0.8, None]


# Where paths start


def test_a_suite_given_as_a_path_starts_from_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("sub/s.yaml").write_text(SMALL)
    assert suite_and_folder("sub/s.yaml")[1] == tmp_path.resolve() / "sub"
    assert suite_and_folder("sub/s.yaml", "other")[1] == Path("other")
    assert suite_and_folder(Suite.parse(SMALL))[1] == Path(".")
