import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from massmerge.merging.ranks import (
    MatrixSize,
    core_bytes,
    factor_bytes,
    ranks_by_budget,
    ranks_by_rule,
    too_small,
    total_bytes,
)

sizes = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 200), st.sampled_from([torch.bfloat16, torch.float32, torch.int8])),
    min_size=1,
    max_size=6,
).map(lambda rows: [MatrixSize(f"layer.{i}", m, n, b, (min(m, n),) * 3) for i, (m, n, b) in enumerate(rows)])


def matrix(m: int = 64, n: int = 32, limits: tuple[int, ...] = (32, 32, 32, 32)) -> MatrixSize:
    return MatrixSize("weight", m, n, torch.float32, limits)


def test_factors_weigh_k_rows_and_columns_and_float32_singular_values():
    assert factor_bytes(matrix(), 5) - factor_bytes(matrix(), 4) == (64 + 32) * 4 + 4
    assert factor_bytes(matrix(), 0) == 0


def test_factors_in_int8_weigh_a_byte_a_number_and_a_scale_of_two_bytes_for_each_vector():
    int8 = MatrixSize("weight", 64, 32, torch.int8, (32,) * 4)
    assert factor_bytes(int8, 5) - factor_bytes(int8, 4) == 64 + 32 + 4 + 2 * 2


def test_a_core_weighs_the_square_of_the_ranks_together():
    assert 0 <= core_bytes(matrix(), (3, 4)) - 7**2 * 4 < 200
    assert core_bytes(matrix(), (0, 0)) == 0


@given(sizes, st.integers(0, 10**6), st.booleans())
def test_ranks_by_budget_hold_the_budget_or_are_the_least_there_are(matrices, budget, fixed):
    ranks = ranks_by_budget(matrices, budget, fixed=fixed)
    least = ranks_by_budget(matrices, 0, fixed=fixed)
    assert total_bytes(matrices, ranks, fixed=fixed) <= budget or ranks == least
    assert all(1 <= k <= min(m.m, m.n) for m in matrices for k in ranks[m.name])


@given(sizes, st.integers(0, 10**6), st.integers(0, 10**5))
def test_a_larger_budget_never_lowers_a_rank(matrices, budget, more):
    low, high = (ranks_by_budget(matrices, b, fixed=False) for b in (budget, budget + more))
    assert all(a <= b for name in low for a, b in zip(low[name], high[name], strict=True))


def test_a_budget_is_used_up_to_the_bytes_of_one_rank_of_each_shape():
    matrices = [MatrixSize(f"w{i}", 256, 256 if i % 2 else 1024, torch.float32, (256,) * 8) for i in range(12)]
    budget = 12 * 256 * 640 * 4
    used = total_bytes(matrices, ranks_by_budget(matrices, budget, fixed=False), fixed=False)
    assert 0.9 * budget < used <= budget


def test_a_budget_larger_than_everything_keeps_full_ranks():
    assert ranks_by_budget([matrix()], 10**9, fixed=False) == {"weight": (32, 32, 32, 32)}


def test_cores_take_their_share_of_the_budget():
    budget = 40_000
    without, with_cores = (ranks_by_budget([matrix()], budget, fixed=fixed)["weight"][0] for fixed in (False, True))
    assert with_cores < without


def test_an_adapter_keeps_no_more_than_its_own_rank_and_an_untouched_matrix_nothing():
    assert ranks_by_budget([matrix(limits=(8, 0, 32))], 10**9, fixed=False) == {"weight": (8, 0, 32)}


@pytest.mark.parametrize(
    ("rule", "ranks"), [("1/T", (8, 8, 8, 8)), (5, (5, 5, 5, 5)), (100, (32, 32, 32, 32)), (0.5, (32, 32, 32, 32))]
)
def test_ranks_by_rule(rule, ranks):
    assert ranks_by_rule([matrix()], rule) == {"weight": ranks}


@pytest.mark.parametrize(
    ("shape", "tasks", "small"),
    [((2, 32), 3, True), ((32, 2), 3, True), ((2, 32), 2, False), ((384, 768), 1000, False)],
)
def test_a_matrix_is_too_small_with_fewer_rows_or_columns_than_tasks(shape, tasks, small):
    assert too_small(shape, tasks) is small


def test_one_over_t_is_never_less_than_one():
    assert ranks_by_rule([matrix(2, 32, (2,) * 8)], "1/T") == {"weight": (1,) * 8}
