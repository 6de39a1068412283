"""A batch divided among threads gives what it gives undivided."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import massmerge
from massmerge.model.speed import parallel
from models import FAMILIES, family_bundle, rows_of

CPU = torch.device("cpu")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@given(st.integers(0, 300))
def test_parts_are_the_batch_in_order(batch):
    parts = parallel.parts_of(batch, CPU)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(batch))


def test_small_batches_and_other_devices_are_not_divided(two_threads):
    assert len(parallel.parts_of(64, CPU)) == 2
    assert len(parallel.parts_of(15, CPU)) == 1
    assert len(parallel.parts_of(64, torch.device("meta"))) == 1


def test_parts_run_with_one_core_each_and_leave_the_caller_its_own(two_threads):
    seen = parallel.run_parts(lambda rows: torch.get_num_threads(), parallel.parts_of(64, CPU))
    assert seen == [1, 1]
    assert torch.get_num_threads() == 2


def test_an_error_in_a_part_reaches_the_caller(two_threads):
    with pytest.raises(ZeroDivisionError):
        parallel.run_parts(lambda rows: 1 // rows.start, parallel.parts_of(64, CPU))


def test_a_child_process_makes_threads_of_its_own(two_threads):
    parallel.run_parts(lambda rows: 0, parallel.parts_of(64, CPU))
    child = os.fork()
    if child == 0:
        os._exit(0 if not parallel._pools else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("name", list(FAMILIES))
def test_features_of_a_divided_batch_are_those_of_an_undivided_one(root, name, two_threads, monkeypatch):
    model = massmerge.load(family_bundle(root, name))
    rows = rows_of(FAMILIES[name].make_inputs(21))
    divided = model.embed(rows)
    monkeypatch.setattr(parallel, "_LEAST", 1000)
    assert float((divided - model.embed(rows)).abs().max()) < 1e-4


GROUPS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=12)


@given(groups=GROUPS, parts=st.integers(1, 4))
def test_every_group_is_there_once(groups, parts):
    rows = [r for r, _ in groups]
    assert sorted(parallel.even_order(rows, [r * t for r, t in groups], parts)) == list(range(len(groups)))


def test_parts_cost_the_same_and_no_group_is_cut():
    tasks = [2, 1, 2, 1, 1, 1]
    rows = [2, 2, 2, 2, 2, 2]
    order = parallel.even_order(rows, [t * r for t, r in zip(tasks, rows, strict=True)], 2)
    assert [sum(tasks[g] for g in half) for half in (order[:3], order[3:])] == [4, 4]


def test_a_large_group_comes_first_and_small_ones_fill_up():
    rows = [1, 5, 1, 1]
    assert parallel.even_order(rows, rows, 2)[0] == 1


def test_one_part_goes_by_cost_alone():
    assert parallel.even_order([1, 2, 3], [1.0, 2.0, 3.0], 1) == [2, 1, 0]
