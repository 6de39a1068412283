"""Rows in columns give back what was put in."""

import tracemalloc
from array import array

from hypothesis import given
from hypothesis import strategies as st

from massmerge.evaluation.metrics import Given
from massmerge.evaluation.results import RowResult
from massmerge.evaluation.row_table import RowTable

NAMES = st.sampled_from(["red", "green", "blue", ""])
ANSWERS = st.builds(Given, st.none() | NAMES, st.none() | st.text(), st.none() | st.floats(allow_nan=False))
RESIDUALS = st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(lambda values: array("f", values))
ROWS = st.builds(
    RowResult, NAMES, st.integers(0, 10**9), st.text(), ANSWERS, st.lists(NAMES, max_size=3).map(tuple), RESIDUALS,
    st.none() | st.text(), ANSWERS, ANSWERS, st.none() | st.floats(0, 1), ANSWERS, ANSWERS,
)  # fmt: skip


def table_of(rows: list[RowResult]) -> RowTable:
    table = RowTable()
    for row in rows:
        table.append(row)
    return table


@given(st.lists(ROWS, max_size=8))
def test_a_table_gives_back_its_rows(rows):
    table = table_of(rows)
    assert list(table) == rows and table[1:3] == rows[1:3] and len(table) == len(rows)
    assert table == table_of(rows) and (not rows or table[-1] == rows[-1])


@given(st.lists(ROWS, min_size=1, max_size=8), ANSWERS, st.data())
def test_answers_that_come_later_are_put_in_their_row(rows, answer, data):
    table, place = table_of(rows), data.draw(st.integers(0, len(rows) - 1))
    table.known[place] = table.once[place] = answer
    rows[place].known = rows[place].once = answer
    assert list(table) == rows


@given(st.lists(ROWS, max_size=8))
def test_the_rows_of_a_task_come_in_their_order(rows):
    own = sorted((row for row in rows if row.task == "red"), key=lambda row: row.place)
    found = table_of(rows).of_task("red")
    assert list(found) == own and found[:2] == own[:2] and len(found) == len(own)


def test_answers_that_no_row_has_take_no_room():
    def held(answer):
        tracemalloc.start()
        table = table_of([RowResult("red", i, "yes", Given("red", "yes", 0.5), expert=answer) for i in range(2_000)])
        found, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert table[1_999].expert == answer
        return found

    assert held(Given("red", "no", 0.5)) - held(Given()) > 16 * 2_000


def test_a_row_takes_a_fifth_of_what_an_object_takes():
    answer = Given("red", "yes", 0.5)
    tracemalloc.start()
    table = RowTable()
    for place in range(20_000):
        table.append(RowResult("red", place, "yes", answer, ("red",), array("f", range(8)), None, answer, answer, 0.5))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / len(table) < 200
