"""`mass eval`: tables, JSON, dry runs, reports, and every kind of bad input."""

import json

import pytest
from click.testing import CliRunner

import massmerge
from massmerge.cli.main import main
from models import text_bundle

SUITE = """\
tasks:
  spam:
    data: spam.csv
    input: text
    reference: 0.5
  topic:
    data: topic.jsonl
    input: body
    label: kind
    labels: [politics, sports, science, arts]
    reference: 0.5
"""


@pytest.fixture(scope="module")
def bundle(root):
    return str(text_bundle(root))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a suite of two tasks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "spam.csv").write_text("text,label\nwin a free prize now,spam\ncall now,spam\nmeeting report,ham\n")
    rows = [("vote on the law", 0), ("the team won", 1), ("a cell", 2), ("a star", 2)]
    (tmp_path / "topic.jsonl").write_text("".join(json.dumps({"body": b, "kind": k}) + "\n" for b, k in rows))
    (tmp_path / "suite.yaml").write_text(SUITE)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(main, ["eval", *map(str, arguments)])


def figures(*arguments):
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(*arguments, code=2):
    done = run(*arguments)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    assert done.stdout == ""
    return done.stderr


def test_the_table_has_a_row_for_each_task_and_the_means(bundle, here):
    done = run(bundle, "suite.yaml")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == f"{bundle} on suite, split test: 2 tasks, 7 rows"
    header = ["task", "rows", "accuracy", "95", "%", "routing", "task", "given", "expert", "normalised"]
    assert lines[2].split() == header
    assert [line.split()[:2] for line in lines[3:5]] == [["spam", "3"], ["topic", "4"]]
    for words in (
        "mean over the tasks",
        "normalised accuracy",
        "routed to",
        "selected sets",
        "abstained",
        "time per input",
    ):
        assert words in done.stdout
    assert "times the base" in done.stdout


def test_json_is_what_python_gives(bundle, here):
    found = figures(bundle, "suite.yaml")
    expected = massmerge.evaluate(bundle, "suite.yaml").to_dict()
    for key in ("tasks", "means", "confusion", "set_sizes", "options", "notes", "sizes"):
        assert found[key] == json.loads(json.dumps(expected[key]))


def test_the_same_call_gives_the_same_figures(bundle, here):
    first, again = (figures(bundle, "suite.yaml", "--limit", 2, "--seed", 3) for _ in range(2))
    for key in ("tasks", "means", "confusion"):
        assert first[key] == again[key]


def test_shared_labels_have_columns_of_their_own(bundle, here):
    plain = run(bundle, "suite.yaml").stdout
    (here / "suite.yaml").write_text(SUITE + "shared_labels: [[spam/ham, topic/science], [spam/spam, topic/arts]]\n")
    shared = run(bundle, "suite.yaml").stdout
    assert "shared" not in plain
    assert "normalised, shared" in shared
    assert "accuracy, strict" in shared and "accuracy, shared labels" in shared


def test_notes_and_failures_go_to_standard_error_and_figures_are_printed(bundle, here):
    with (here / "spam.csv").open("a") as file:
        file.write(",ham\n" * 7)
    done = run(bundle, "suite.yaml")
    assert done.exit_code == 0
    assert "7 rows could not be read and count as wrong" in done.stderr
    assert "spam.csv:4: the text cell is empty." in done.stderr
    assert "… and 2 more" in done.stderr
    assert "note: not measured, though inputs may be routed there: mood." in done.stderr
    assert "could not be read: 7 of 14 rows" in done.stdout
    assert len(figures(bundle, "suite.yaml")["failures"]) == 7


def test_quiet_prints_warnings_only(bundle, here):
    done = run(bundle, "suite.yaml", "-q")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "note:" in done.stderr


def test_tasks_and_rows_can_be_chosen(bundle, here):
    found = figures(bundle, "suite.yaml", "--task", "topic", "--limit", 3)
    assert [(t["task"], t["rows"], t["total"]) for t in found["tasks"]] == [("topic", 3, 4)]


def test_limits_of_abstention_are_passed_on(bundle, here):
    found = figures(bundle, "suite.yaml", "--unknown", "lift=100", "--unknown", "agreement=0.1")
    assert found["options"]["unknown"] == {"lift": 100.0, "agreement": 0.1}
    assert found["set_sizes"] == {"0": 7}


def test_without_the_oracle_there_is_no_such_figure(bundle, here):
    assert "known" in figures(bundle, "suite.yaml")["means"]
    assert "known" not in figures(bundle, "suite.yaml", "--no-oracle")["means"]


def test_a_batch_may_be_routed_as_one(bundle, here):
    assert figures(bundle, "suite.yaml", "--route", "batch", "--batch-size", 2)["options"]["route"] == "batch"


def test_experts_are_found_from_the_folder_that_is_named(bundle, here, root):
    found = figures(bundle, "suite.yaml", "--experts", "--folder", root / "text")
    assert {t["reference_source"] for t in found["tasks"]} == {"measured"}


def test_a_report_is_written_and_named(bundle, here):
    done = run(bundle, "suite.yaml", "--report", "deep/report")
    assert "report in deep/report: report.html" in done.stdout
    assert (here / "deep" / "report" / "report.html").is_file()


def test_more_tasks_than_a_terminal_is_wide_for_show_the_worst_mistakes(bundle, here, monkeypatch):
    from massmerge.cli import eval as verb

    monkeypatch.setattr(verb, "_WIDEST_MATRIX", 1)
    assert "most frequent routing errors\n" in run(bundle, "suite.yaml").stdout


# Dry runs


def test_a_dry_run_says_what_would_run_and_loads_nothing(bundle, here, monkeypatch):
    from massmerge.cli import eval as verb

    monkeypatch.setattr(verb, "evaluate", lambda *_, **__: pytest.fail("ran"))
    done = run(bundle, "suite.yaml", "--dry-run", "--limit", 3, "--experts")
    assert done.exit_code == 0
    assert "suite: 2 tasks; nothing is run" in done.stdout
    assert ["topic", "3", "4"] in [line.split()[:3] for line in done.stdout.splitlines()]
    assert "6 rows as one stream without task names" in done.stdout
    assert "through the experts: spam, topic" in done.stdout


def test_a_dry_run_as_json_counts_the_rows_of_each_class(bundle, here):
    found = figures(bundle, "suite.yaml", "--dry-run")
    assert found["tasks"][0]["classes"] == {"ham": 1, "spam": 2}
    assert len(found["passes"]) == 2


def test_a_dry_run_refuses_what_a_run_would(bundle, here):
    (here / "spam.csv").unlink()
    assert "spam.csv: no such file" in refused(bundle, "suite.yaml", "--dry-run")


# Bad input


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("input: text", "inptu: text", "suite.yaml:4: unknown key 'tasks.spam.inptu'"),
        ("data: spam.csv", "data: gone.csv", "gone.csv: no such file. Its folder holds spam.csv."),
        ("input: body", "input: text", "topic.jsonl: no column 'text'; available: 'body', 'kind'."),
        ("label: kind", "label: class", "topic.jsonl: no column 'class'"),
        ("science, arts", "science, art", "the suite names labels that the head does not have: art"),
        (
            "labels: [politics, sports, science, arts]",
            "metric: accuracy",
            "the head does not know 3 of the data's labels",
        ),
        ("  spam:", "  eggs:", "the bundle has no task 'eggs' with labels; choose from spam, topic, mood."),
        ("reference: 0.5", "reference: 50", "'tasks.spam.reference'"),
    ],
)
def test_a_fault_of_the_suite_or_its_data_is_told_and_nothing_runs(bundle, here, old, new, message):
    (here / "suite.yaml").write_text(SUITE.replace(old, new, 1))
    assert message in refused(bundle, "suite.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "validation"], "the split 'validation' was requested, but the path is the same for every split"),
        (["--task", "eggs"], "no task 'eggs' in the suite. Choose from spam, topic."),
        (
            ["--unknown", "lift"],
            "'lift': write --unknown LIMIT=NUMBER; limits are lift, agreement, confidence, typicality",
        ),
        (["--unknown", "lift=much"], "write --unknown LIMIT=NUMBER"),
        (["--unknown", "lfit=1"], "write --unknown LIMIT=NUMBER"),
        (["--unknown", "agreement=7"], "typicality (0 to 1)"),
        (["--router", "prototype"], "the router prototype has not been fitted"),
        (["--router", "guess"], "no router 'guess'"),
        (["--limit", "0"], "Invalid value for '--limit'"),
        (["--experts"], "Measuring the experts needs their files."),
    ],
)
def test_an_option_that_is_wrong_is_told(bundle, here, options, message):
    assert message in refused(bundle, "suite.yaml", *options)


def test_a_suite_or_bundle_that_is_not_there_is_named(bundle, here):
    assert "gone.yaml: no such suite." in refused(bundle, "gone.yaml")
    assert "gone: no such folder." in refused("gone", "suite.yaml")


def test_a_library_that_is_missing_is_named_with_exit_code_1(bundle, here, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'massmerge[eval]'" in refused(bundle, "suite.yaml", "--report", "r", code=1)
    assert not (here / "r").exists()
