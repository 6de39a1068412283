"""Which rows of a suite are taken, in which order, and what is refused before anything runs."""

import itertools
import tracemalloc

import numpy as np
import pytest

from massmerge import InputError, Suite
from massmerge.evaluation.data import batches_of_one_task, read_suite, read_task, stream_order
from massmerge.evaluation.sources import open_source
from massmerge.evaluation.suite import SuiteTask
from massmerge.io.spool import Spool
from tables import ROWS, png, read_rows, write_table

# What is refused


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("column", ["input", "label"])
def test_a_column_that_is_missing_is_an_error_with_those_there_are(tmp_path, kind, column):
    write_table(tmp_path / f"t.{kind}", ROWS)
    with pytest.raises(InputError, match="no column 'body'; available: 'text', 'other', 'label'"):
        read_rows(tmp_path, data=f"t.{kind}", **{"input": "text", column: "body"})


def test_a_file_that_is_missing_is_an_error_with_those_beside_it(tmp_path):
    write_table(tmp_path / "test.csv", ROWS)
    with pytest.raises(InputError, match=r"validation\.csv: no such file\. Its folder holds test\.csv\."):
        read_rows(tmp_path, data="{split}.csv", input="text", options={"split": "validation"})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"folder": "gone"}, r"gone: no such folder"),
        ({"folder": "empty"}, r"empty: contains no class folders\. Create one folder per class"),
        (
            {"data": "t.xlsx", "input": "a"},
            r"not a supported table\. Use a file that ends in \.csv, \.jsonl, \.parquet, \.tsv",
        ),
        ({"data": "none.csv", "input": "text"}, r"none\.csv: has no rows\. A task needs at least one\."),
        ({"data": "hole.csv", "input": "text"}, r"hole\.csv:2: has no label \(1 of 3 rows\)\. Fill it in, or remove"),
        ({"data": "bad.jsonl", "input": "text"}, r"row 2 of .*bad\.jsonl: not valid JSON"),
    ],
)
def test_what_cannot_be_measured_is_told_with_its_place_and_what_to_do(tmp_path, more, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.xlsx").write_bytes(b"x")
    (tmp_path / "none.csv").write_text("text,label\n")
    (tmp_path / "hole.csv").write_text("text,label\na,x\nb,\nc,y\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a", "label": "x"}\n{"text":\n')
    with pytest.raises(InputError, match=message):
        read_rows(tmp_path, **more)


def test_a_label_that_the_head_does_not_know_is_an_error_that_lists_both_sides(tmp_path):
    write_table(tmp_path / "t.csv", [{"text": "a", "label": "pos"}, {"text": "b", "label": "x"}])
    with pytest.raises(InputError) as caught:
        read_rows(tmp_path, data="t.csv", input="text")
    words = str(caught.value)
    assert "the head does not know 1 of the data's labels, such as 'pos'" in words
    assert "labels in the data: pos, x" in words
    assert "labels of the head: x, y" in words
    assert "`labels: {label in the data: label of the head}`" in words


def test_labels_outside_of_a_small_sample_are_refused_too(tmp_path):
    write_table(tmp_path / "t.csv", [{"text": str(i), "label": "x" if i < 50 else "strange"} for i in range(51)])
    for seed in range(5):
        with pytest.raises(InputError, match="does not know 1 of the data's labels"):
            read_rows(tmp_path, data="t.csv", input="text", options={"limit": 1, "seed": seed})


@pytest.mark.parametrize(
    "more", [{"labels": {"x": "typo"}}, {"labels": ["x", "typo"]}, {"metric": "f1", "positive": "typo"}]
)
def test_a_label_in_the_suite_that_the_head_does_not_have_is_refused(tmp_path, more):
    write_table(tmp_path / "t.csv", [{"text": "a", "label": "y"}])
    with pytest.raises(
        InputError, match=r"the suite names labels that the head does not have: typo\.\n  labels of the"
    ):
        read_rows(tmp_path, data="t.csv", input="text", **more)


def test_spearman_needs_numbers_and_a_head_with_one_output(tmp_path):
    write_table(tmp_path / "t.csv", [{"text": "a", "label": "1.5"}, {"text": "b", "label": "much"}])
    more = {"data": "t.csv", "input": "text", "metric": "spearman"}
    with pytest.raises(InputError, match="is for heads with one output; this one has 2: x, y"):
        read_rows(tmp_path, **more)
    with pytest.raises(InputError, match=r"t\.csv:2: 'much' is not a number"):
        read_rows(tmp_path, ("LABEL_0",), **more)


def test_a_task_that_the_bundle_lacks_is_refused_before_its_data_is_looked_for(tmp_path):
    suite = Suite.parse("tasks: {a: {data: gone.csv, input: x}, b: {data: gone.csv, input: x}}")
    with pytest.raises(InputError, match=r"the bundle has no task 'b' with labels; choose from a, c\."):
        read_suite(suite, tmp_path, {"a": ("x",), "c": ("x",)}, image=False)


def test_what_is_wrong_with_several_tasks_is_told_at_once(tmp_path):
    suite = Suite.parse("tasks: {a: {data: gone.csv, input: x}, b: {folder: nowhere}}")
    with pytest.raises(InputError) as caught:
        read_suite(suite, tmp_path, {"a": ("x",), "b": ("x",)}, image=False)
    assert "task a: " in str(caught.value) and "task b: " in str(caught.value)


def test_tasks_can_be_chosen_by_name():
    suite = Suite.parse("tasks: {a: {data: x, input: x}, b: {data: x, input: x}}")
    assert list(suite.only(["b"]).tasks) == ["b"]
    assert suite.only([]) == suite
    with pytest.raises(InputError, match=r"no task 'c' in the suite\. Choose from a, b\."):
        suite.only(["c"])


# Which rows are taken


def sample(tmp_path, limit, seed=0, task="a"):
    if not (tmp_path / "t.csv").exists():
        write_table(tmp_path / "t.csv", [{"text": str(i), "label": "x"} for i in range(100)])
    data = read_task(task, SuiteTask(data="t.csv", input="text"), tmp_path, ["x"], image=False, limit=limit, seed=seed)
    data.read_inputs()
    assert [data.inputs[i] for i in range(len(data))] == [str(row) for row in data.rows]
    return data.rows


def test_a_limit_draws_rows_by_its_seed(tmp_path):
    assert sample(tmp_path, 10) == sample(tmp_path, 10)
    assert sample(tmp_path, 10) != sample(tmp_path, 10, seed=1)
    assert sample(tmp_path, 10) != sample(tmp_path, 10, task="b")
    assert len(set(sample(tmp_path, 10))) == 10
    assert sample(tmp_path, 500) == list(range(100))


def test_a_smaller_limit_takes_some_of_the_rows_of_a_larger_one(tmp_path):
    assert set(sample(tmp_path, 10)) < set(sample(tmp_path, 40))


def test_names_of_rows_say_where_they_lie(tmp_path):
    write_table(tmp_path / "t.csv", ROWS)
    source = open_source(SuiteTask(data="t.csv", input="text"), tmp_path, None, image=False)
    assert source.row_name(0) == f"{tmp_path / 't.csv'}:1"


# The stream


def test_the_stream_holds_every_row_once_in_an_order_of_its_seed():
    counts = {"a": 40, "b": 3, "c": 17}
    order = stream_order(counts, 0)
    assert sorted(order) == sorted((task, i) for task, n in counts.items() for i in range(n))
    assert order == stream_order(counts, 0)
    assert order != stream_order(counts, 1)
    assert list(order) != sorted(order)
    assert list(order[5:9]) == list(order)[5:9]


def test_a_window_of_the_stream_is_sorted_and_rows_of_equal_length_keep_their_order():
    order = stream_order({"a": 9, "b": 8}, 0)
    found = list(order.sorted_within(5, lambda row: row[1] // 3))
    assert found == [row for at in range(0, 17, 5) for row in sorted(order[at : at + 5], key=lambda row: row[1] // 3)]


def test_a_stream_of_many_rows_takes_some_bytes_for_each():
    tracemalloc.start()
    order = stream_order({"a": 100_000, "b": 100_000}, 0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 10 * len(order)


def test_tasks_are_spread_over_the_whole_stream():
    order = [task for task, _ in stream_order({"a": 300, "b": 300}, 0)]
    halves = [order[:300].count("a"), order[300:].count("a")]
    assert min(halves) > 120
    changes = sum(x != y for x, y in itertools.pairwise(order))
    assert changes > 240


def test_batches_of_one_task_hold_every_row_once_and_are_shuffled():
    counts = {"a": 40, "b": 3, "c": 17}
    batches = batches_of_one_task(counts, 8, 0)
    assert sorted(pair for batch in batches for pair in batch) == sorted(stream_order(counts, 0))
    assert all(len({task for task, _ in batch}) == 1 and len(batch) <= 8 for batch in batches)
    assert [batch[0][0] for batch in batches] != sorted(batch[0][0] for batch in batches)
    assert all(batch != sorted(batch) for batch in batches if len(batch) == 8)


# The spool


def test_inputs_come_back_from_disk_as_they_went_in_any_order(tmp_path):
    items = ["text", ("a", "b"), tmp_path / "p.png", InputError("broken"), "línea\n", "\ud800", ""]
    spool = Spool()
    for item in items:
        spool.add(item)
    for i in np.random.default_rng(0).permutation(len(items)):
        found = spool[int(i)]
        if isinstance(items[i], InputError):
            assert isinstance(found, InputError) and str(found) == "broken"
        else:
            assert found == items[i] and type(found) is type(items[i])
    spool.add(png())
    assert spool[len(items)].size == (4, 3)
    assert len(spool) == len(items) + 1


def test_the_checksum_of_rows_changes_with_inputs_labels_and_files(tmp_path):
    def checksum(rows, **more):
        write_table(tmp_path / "t.csv", rows)
        data = read_task("a", SuiteTask(data="t.csv", input="text"), tmp_path, ["x", "y"], **{"image": False, **more})
        data.read_inputs()
        return data.sha256()

    rows = [{"text": "a.png", "label": "x"}, {"text": "b", "label": "y"}]
    first = checksum(rows)
    assert first == checksum(rows)
    assert first != checksum([{**rows[0], "label": "y"}, rows[1]])
    assert first != checksum([{**rows[0], "text": "c"}, rows[1]])
    (tmp_path / "a.png").write_bytes(png())
    before = checksum(rows, image=True)
    (tmp_path / "a.png").write_bytes(png((9, 9)))
    assert checksum(rows, image=True) != before
