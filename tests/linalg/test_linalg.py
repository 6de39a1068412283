"""The mathematics against its naive twins, over ordinary and degenerate matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import naive
from massmerge.linalg.factors import (
    Factors,
    accept_distinct,
    core_matrix,
    cosine_matrix,
    energy_rank,
    inverse_sqrt,
    lora_svd,
    polar_factor,
    principal_cosine,
    quick_core,
    remaining_energy,
    truncated_svd,
    tsv_merge,
    weighted_core,
)

stable = settings(derandomize=True, deadline=None, max_examples=60, database=None)

SPECTRA = {
    "random": None,
    "deficient": lambda r: (torch.arange(r) < max(1, r // 3)).double(),
    "repeated": lambda r: torch.ones(r).double(),
    "decaying": lambda r: torch.logspace(0, -6, r, dtype=torch.float64),
    "zero": lambda r: torch.zeros(r).double(),
}


def basis(m: int, r: int, seed: int) -> Tensor:
    """Random orthonormal columns (m, r), float64."""
    noise = torch.randn(m, r, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(noise)[0]


def matrix(m: int, n: int, kind: str, seed: int, scale: float = 1.0) -> Tensor:
    """A float32 matrix (m, n) with a spectrum of that kind."""
    r = min(m, n)
    if SPECTRA[kind] is None:
        return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)) * scale
    return (scale * (basis(m, r, seed) * SPECTRA[kind](r)) @ basis(n, r, seed + 1).mT).float()


def factors(m: int, n: int, k: int, seed: int) -> Factors:
    return truncated_svd(matrix(m, n, "random", seed), k)


sides = st.sampled_from([1, 2, 7, 24, 60])
seeds = st.integers(0, 10**6)
matrices = st.builds(matrix, sides, sides, st.sampled_from(list(SPECTRA)), seeds, st.sampled_from([1e-8, 1.0, 1e4]))


@st.composite
def matrix_and_rank(draw: st.DrawFn) -> tuple[Tensor, int]:
    a = draw(matrices)
    return a, draw(st.integers(1, min(a.shape)))


@st.composite
def tasks_of_one_shape(draw: st.DrawFn) -> list[Factors]:
    """Up to four random tasks whose ranks together stay well below the sides, so that the bases are independent."""
    m, n, k = draw(st.sampled_from([(40, 40, 5), (60, 30, 4), (30, 60, 3)]))
    return [factors(m, n, k, draw(seeds)) for _ in range(draw(st.integers(1, 4)))]


@stable
@given(matrix_and_rank())
def test_truncation_is_as_close_to_the_matrix_as_the_best_of_its_rank(case: tuple[Tensor, int]) -> None:
    a, k = case
    best = (a.double() - naive.truncated_product(a, k)).norm()
    assert (a.double() - truncated_svd(a, k).dense().double()).norm() <= best + 1e-5 * a.double().norm()


@stable
@given(matrix_and_rank())
def test_truncated_product_is_that_of_a_full_svd_where_it_is_unique(case: tuple[Tensor, int]) -> None:
    a, k = case
    s = naive.svd(a, min(a.shape))[1]
    following = s[k] if k < len(s) else 0.0
    if s[k - 1] - following > 1e-3 * s[0]:
        assert naive.relative_error(truncated_svd(a, k).dense(), naive.truncated_product(a, k)) <= 1e-4


@stable
@given(matrix_and_rank())
def test_bases_are_orthonormal_whatever_the_spectrum(case: tuple[Tensor, int]) -> None:
    f = truncated_svd(*case)
    torch.testing.assert_close(f.u.mT @ f.u, torch.eye(case[1]), atol=1e-5, rtol=0)
    torch.testing.assert_close(f.v @ f.v.mT, torch.eye(case[1]), atol=1e-5, rtol=0)


@stable
@given(matrix_and_rank())
def test_singular_values_are_the_largest_ones_falling_and_not_negative(case: tuple[Tensor, int]) -> None:
    a, k = case
    s = truncated_svd(a, k).s
    expected = naive.svd(a, k)[1]
    assert (s >= 0).all()
    assert (s.diff() <= 0).all()
    torch.testing.assert_close(s.double(), expected, atol=2e-6 * float(expected[0]), rtol=0)


@pytest.mark.parametrize("k", [0, 4])
def test_an_impossible_rank_names_the_rank_and_the_shape(k: int) -> None:
    with pytest.raises(ValueError, match=f"rank {k} .*3×5"):
        truncated_svd(torch.zeros(3, 5), k)


def test_a_delta_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(np.linalg.LinAlgError, match="finite"):
        truncated_svd(torch.full((20, 20), float("nan")), 2)


@stable
@given(matrices, st.sampled_from([0.1, 0.5, 0.9, 0.99]))
def test_energy_rank_is_the_smallest_that_keeps_the_share(a: Tensor, share: float) -> None:
    energy = naive.svd(a, min(a.shape))[1].square()
    k, slack = energy_rank(a, share), 1e-9 * energy.sum()
    assert energy[:k].sum() >= share * energy.sum() - slack
    assert k == 1 or energy[: k - 1].sum() < share * energy.sum() + slack


@stable
@given(sides, st.sampled_from([1, 3, 8]), sides, seeds, st.sampled_from([1e-8, 1.0, 1e4]))
def test_lora_factors_are_the_svd_of_the_product(m: int, r: int, n: int, seed: int, scale: float) -> None:
    b, a = matrix(m, r, "random", seed, scale), matrix(r, n, "random", seed + 1)
    product = b.double() @ a.double()
    f = lora_svd(b, a)
    assert naive.relative_error(f.dense(), product) <= 1e-5
    assert naive.relative_error(f.s, naive.svd(product, f.rank)[1]) <= 1e-5


@stable
@given(sides, st.sampled_from([1, 3, 8]), sides, seeds)
def test_lora_bases_are_orthonormal_even_when_an_adapter_is_zero(m: int, r: int, n: int, seed: int) -> None:
    f = lora_svd(torch.zeros(m, r), matrix(r, n, "random", seed))
    torch.testing.assert_close(f.u.mT @ f.u, torch.eye(f.rank), atol=1e-5, rtol=0)
    torch.testing.assert_close(f.v @ f.v.mT, torch.eye(f.rank), atol=1e-5, rtol=0)


@stable
@given(sides, sides, st.sampled_from(["random", "repeated", "deficient"]), seeds, st.sampled_from([1e-8, 1.0, 1e4]))
def test_polar_factor_is_that_of_a_full_svd_at_any_scale(m: int, n: int, kind: str, seed: int, scale: float) -> None:
    x = (matrix(m, n, kind, seed).double() * scale).float().double()
    # A random square matrix can be close to singular; its polar factor is then as uncertain as its smallest direction.
    d = naive.svd(x, min(m, n))[1]
    if kind == "deficient" or d[-1] > 1e-4 * d[0]:
        assert naive.relative_error(polar_factor(x), naive.polar(x, 1e-5)) <= 1e-4


@pytest.mark.parametrize("ranks", [(24,) * 4, (40,) * 3, (24,) * 5, (25,) * 5])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e4])
def test_polar_factor_of_float32_bases_is_that_of_a_full_svd(ranks: tuple[int, ...], scale: float) -> None:
    """From bases that leave room, which float32 serves, to such as nearly fill the space, which it does not."""
    x = torch.cat([basis(128, k, seed).float() for seed, k in enumerate(ranks)], 1) * scale
    assert naive.relative_error(polar_factor(x), naive.polar(x, 1e-5)) <= 1e-5
    assert naive.relative_error(polar_factor(x.mT), naive.polar(x.mT, 1e-5)) <= 1e-5


def test_polar_factor_of_float32_bases_that_nearly_share_a_direction_is_that_of_a_full_svd() -> None:
    x = basis(200, 12, 0).float()
    x[:, 11] = x[:, 10] + 1e-3 * x[:, 11]
    assert naive.relative_error(polar_factor(x), naive.polar(x, 1e-6)) <= 1e-5


def test_equal_columns_of_float32_get_equal_shares() -> None:
    x = basis(200, 6, 0).float()
    torch.testing.assert_close(polar_factor(torch.cat([x, x], 1)), torch.cat([x, x], 1) / 2**0.5, atol=1e-5, rtol=0)


def test_inverse_root_leaves_null_directions_null() -> None:
    assert inverse_sqrt(torch.diag(torch.tensor([4.0, 0.0]))).tolist() == [[0.5, 0.0], [0.0, 0.0]]


@stable
@given(tasks_of_one_shape())
def test_merge_is_that_of_full_svds(tasks: list[Factors]) -> None:
    assert naive.relative_error(tsv_merge(tasks), naive.tsv_merge(tasks)) <= 1e-4


def test_merge_keeps_its_precision_when_the_ranks_fill_the_matrix() -> None:
    tasks = [factors(256, 256, 32, seed) for seed in range(8)]
    assert naive.relative_error(tsv_merge(tasks), naive.tsv_merge(tasks)) <= 2e-6


@stable
@given(tasks_of_one_shape())
def test_core_between_the_bases_is_the_merge(tasks: list[Factors]) -> None:
    assert naive.relative_error(naive.core_product(tasks, core_matrix(tasks)), naive.tsv_merge(tasks)) <= 1e-4


@stable
@given(tasks_of_one_shape())
def test_quick_core_is_the_core(tasks: list[Factors]) -> None:
    """Whether the bases share little (products alone), much, or all (eigenvalues)."""
    assert naive.relative_error(naive.core_product(tasks, quick_core(tasks)), naive.tsv_merge(tasks)) <= 1e-4


@stable
@given(tasks_of_one_shape(), st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4))
def test_weighted_core_is_that_of_scaled_singular_vectors(tasks: list[Factors], weights: list[float]) -> None:
    expected = naive.weighted_tsv_merge(tasks, weights[: len(tasks)])
    found = naive.core_product(tasks, weighted_core(tasks, weights[: len(tasks)]))
    assert naive.relative_error(found, expected) <= 1e-3


@pytest.mark.parametrize("ranks", [(6, 6), (4, 9, 3)])
def test_quick_core_of_tasks_that_share_little_needs_no_eigenvalues(ranks: tuple[int, ...], monkeypatch) -> None:
    tasks = [factors(200, 150, rank, seed) for seed, rank in enumerate(ranks)]
    expected = core_matrix(tasks)
    monkeypatch.setattr("massmerge.linalg.factors.core_matrix", None)
    assert naive.relative_error(quick_core(tasks), expected) <= 1e-5


@pytest.mark.parametrize("copies", [2, 3])
def test_quick_core_of_identical_tasks_is_the_one_delta(copies: int) -> None:
    f = factors(12, 9, 4, 0)
    assert naive.relative_error(naive.core_product([f] * copies, quick_core([f] * copies)), f.dense()) <= 1e-5


def test_core_of_one_task_is_exactly_its_singular_values() -> None:
    f = factors(20, 12, 4, seed=1)
    assert torch.equal(core_matrix([f]), torch.diag(f.s))


def test_merge_of_one_task_is_exactly_its_delta() -> None:
    f = factors(20, 12, 4, seed=1)
    assert torch.equal(tsv_merge([f]), f.dense())


@pytest.mark.parametrize("copies", [2, 5])
def test_identical_tasks_merge_to_the_one_delta(copies: int) -> None:
    f = factors(30, 20, 4, seed=2)
    assert naive.relative_error(tsv_merge([f] * copies), f.dense()) <= 1e-5
    assert naive.relative_error(naive.core_product([f] * copies, core_matrix([f] * copies)), f.dense()) <= 1e-5


def test_tasks_on_orthogonal_spaces_merge_to_their_sum() -> None:
    u, v = basis(30, 8, 3).float(), basis(20, 8, 4).float().mT
    one, two = (Factors(u[:, i : i + 4], torch.ones(4), v[i : i + 4]) for i in (0, 4))
    assert naive.relative_error(tsv_merge([one, two]), one.dense() + two.dense()) <= 1e-5


def test_tasks_that_share_a_direction_merge_as_full_svds_without_the_null_space() -> None:
    u, v = basis(30, 7, 5).float(), basis(20, 7, 6).float().mT
    one, two = (Factors(u[:, i : i + 4], torch.arange(4, 0, -1.0), v[i : i + 4]) for i in (0, 3))
    assert naive.relative_error(tsv_merge([one, two]), naive.tsv_merge([one, two])) <= 1e-4


@stable
@given(tasks_of_one_shape())
def test_cosines_are_those_of_the_dense_deltas(tasks: list[Factors]) -> None:
    torch.testing.assert_close(cosine_matrix(tasks), naive.cosines([f.dense() for f in tasks]), atol=1e-5, rtol=0)


@stable
@given(tasks_of_one_shape(), st.sampled_from([1e-8, 1.0, 1e4]))
def test_cosines_are_symmetric_and_between_minus_one_and_one(tasks: list[Factors], scale: float) -> None:
    opposite = Factors(-tasks[0].u, tasks[0].s * scale, tasks[0].v)
    cosines = cosine_matrix([*tasks, tasks[0], opposite])
    assert torch.equal(cosines, cosines.mT)
    assert cosines.abs().max() <= 1


def test_cosine_with_a_zero_delta_is_zero() -> None:
    zero = truncated_svd(torch.zeros(20, 12), 4)
    assert cosine_matrix([factors(20, 12, 4, seed=1), zero])[0, 1] == 0


@stable
@given(seeds, st.sampled_from([(1, 1), (2, 5), (5, 5)]))
def test_principal_cosine_is_that_of_the_dense_deltas(seed: int, ranks: tuple[int, int]) -> None:
    a, b = (factors(30, 20, k, seed + i) for i, k in enumerate(ranks))
    assert principal_cosine(a, b) == pytest.approx(naive.principal_cosine(a.dense(), b.dense()), abs=1e-4)


def test_principal_cosine_is_one_if_one_space_holds_the_other() -> None:
    f = factors(30, 20, 5, seed=1)
    part = Factors(f.u[:, :2], f.s[:2], f.v[:2])
    assert 1 - 1e-5 <= principal_cosine(f, part) <= 1


def test_principal_cosine_ignores_factors_beyond_the_rank_of_a_delta() -> None:
    a, b = (truncated_svd(matrix(30, 9, "deficient", seed), 4) for seed in (1, 2))
    assert principal_cosine(a, b) == pytest.approx(naive.principal_cosine(a.dense(), b.dense()), abs=1e-4)


def test_principal_cosine_with_a_zero_delta_is_zero() -> None:
    assert principal_cosine(factors(20, 12, 4, seed=1), truncated_svd(torch.zeros(20, 12), 4)) == 0


@stable
@given(seeds, st.sampled_from([0.1, 0.3, 0.6]))
def test_filter_accepts_what_the_filter_on_dense_deltas_accepts(seed: int, threshold: float) -> None:
    shared = matrix(20, 12, "random", seed)
    tasks = [truncated_svd(shared * weight + matrix(20, 12, "random", seed + 1 + i), 5)
             for i, weight in enumerate([0.0, 1.0, 0.5, 2.0, -1.0])]  # fmt: skip
    assert accept_distinct(cosine_matrix(tasks), threshold) == naive.distinct([f.dense() for f in tasks], threshold)


def test_filter_keeps_a_task_at_the_threshold_and_leaves_out_one_above() -> None:
    at, above = (torch.tensor([[1.0, c], [c, 1.0]], dtype=torch.float64) for c in (0.3, 0.3 + 1e-9))
    assert accept_distinct(at, 0.3) == [0, 1]
    assert accept_distinct(above, 0.3) == [0]


def test_filter_depends_on_the_order_of_the_tasks() -> None:
    chain = torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.0, 0.5], [0.0, 0.5, 1.0]])
    assert accept_distinct(chain, 0.3) == [0, 2]
    middle_first = chain[[1, 0, 2]][:, [1, 0, 2]]
    assert accept_distinct(middle_first, 0.3) == [0]


def test_filter_keeps_an_opposite_task() -> None:
    assert accept_distinct(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), 0.3) == [0, 1]


@given(seeds, st.integers(1, 8))
def test_what_factors_leave_is_the_squared_length_of_the_difference(seed, k):
    a = torch.randn(20, 9, generator=torch.Generator().manual_seed(seed))
    f = truncated_svd(a, k)
    naive = (a.double() - f.u.double() @ f.s.double().diag() @ f.v.double()).square().sum()
    assert remaining_energy(a, f) == pytest.approx(float(naive), rel=1e-5)
