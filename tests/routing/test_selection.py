"""From residuals to selected sets: standardise, vote, weigh, threshold, at most K, the best if none passes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.selection import select, standardize, vote, weigh

seeds = st.integers(0, 10_000)


def residuals(seed, tasks=5, batch=4):
    return torch.rand(batch, tasks, generator=torch.Generator().manual_seed(seed)) + 0.5


def orthonormal(k, d, seed):
    return torch.linalg.qr(torch.randn(d, k, generator=torch.Generator().manual_seed(seed))).Q.mT


# Standardising


@given(seeds, st.integers(2, 9))
def test_standardised_residuals_have_mean_0_and_variance_1_over_the_tasks(seed, tasks):
    found = standardize(residuals(seed, tasks).double())
    assert torch.allclose(found.mean(1), torch.zeros(4).double(), atol=1e-6)
    assert torch.allclose(found.var(1), torch.ones(4).double(), atol=1e-6)


@given(seeds, st.floats(0.01, 1000), st.floats(-100, 100))
def test_standardising_forgets_scale_and_offset(seed, scale, offset):
    r = residuals(seed).double()
    assert torch.allclose(standardize(r * scale + offset), standardize(r), atol=1e-6)


def test_equal_residuals_standardise_to_zero():
    assert standardize(torch.full((2, 4), 7.3)).tolist() == [[0.0] * 4] * 2


def test_residuals_that_differ_by_rounding_alone_standardise_to_zero():
    assert standardize(torch.tensor([[100.0, 100.00001, 100.0]])).tolist() == [[0.0, 0.0, 0.0]]


def test_the_residual_of_a_single_task_standardises_to_zero():
    assert standardize(torch.tensor([[3.0], [4.0]])).tolist() == [[0.0], [0.0]]


def test_residuals_of_zero_standardise_to_zero():
    assert standardize(torch.zeros(1, 3)).tolist() == [[0.0, 0.0, 0.0]]


def test_two_tasks_standardise_to_the_same_two_values_whatever_their_distance():
    near, far = standardize(torch.tensor([[1.0, 1.1], [1.0, 9.0]]))
    assert torch.allclose(near, far, atol=1e-5)
    assert torch.allclose(near, torch.tensor([-(0.5**0.5), 0.5**0.5]), atol=1e-5)


# Voting


def test_a_single_voter_keeps_its_residuals():
    r = residuals(1)
    assert vote([r]) is r


@given(seeds)
def test_several_voters_give_the_sum_of_the_residuals_standardised_per_voter(seed):
    first, second = residuals(seed), residuals(seed + 1) * 50
    assert torch.equal(vote([first, second]), standardize(first) + standardize(second))


def test_a_voter_of_large_activations_has_no_more_say_than_one_of_small_ones():
    first, second = residuals(1), residuals(2)
    assert torch.allclose(vote([first, second * 1000]), vote([first, second]), atol=1e-4)


def test_a_voter_that_sees_no_difference_does_not_change_the_order():
    r = residuals(3)
    assert torch.equal(vote([r, torch.ones_like(r)]).argsort(1), r.argsort(1))


# Weights


@given(seeds, st.integers(1, 9))
def test_weights_are_positive_and_sum_to_1(seed, tasks):
    weights = weigh(residuals(seed, tasks))
    assert bool((weights > 0).all())
    assert torch.allclose(weights.sum(1), torch.ones(4))


@given(seeds)
def test_the_least_residual_has_the_greatest_weight(seed):
    r = residuals(seed)
    for standardized in (True, False):
        assert torch.equal(weigh(r, standardized=standardized).argmax(1), r.argmin(1))


def test_plain_weights_are_the_paper_s_softmax_of_the_negative_residuals():
    r = residuals(5)
    expected = torch.exp(-r) / torch.exp(-r).sum(1, keepdim=True)
    assert torch.allclose(weigh(r, standardized=False), expected)


def test_a_low_temperature_leaves_nothing_to_the_others():
    assert float(weigh(torch.tensor([[1.0, 2.0, 3.0]]), temperature=0.01)[0, 0]) > 0.999


def test_a_high_temperature_makes_all_alike():
    assert torch.allclose(weigh(residuals(1), temperature=1e6), torch.full((4, 5), 0.2), atol=1e-4)


def test_one_task_has_all_the_weight():
    assert weigh(torch.tensor([[5.0]])).tolist() == [[1.0]]


def test_tasks_that_are_alike_share_the_weight_equally():
    assert torch.allclose(weigh(torch.full((1, 4), 2.0)), torch.full((1, 4), 0.25))


# Sets


def test_tasks_below_the_threshold_are_left_out():
    assert select(torch.tensor([[0.5, 0.15, 0.35]]), 0.2, 3) == [[0, 2]]


def test_a_weight_at_the_threshold_is_kept():
    assert select(torch.tensor([[0.75, 0.25]]), 0.25, 2) == [[0, 1]]


def test_at_most_k_tasks_are_kept_the_best_first():
    assert select(torch.tensor([[0.2, 0.5, 0.3]]), 0.0, 2) == [[1, 2]]


def test_the_best_task_is_kept_if_none_passes():
    assert select(torch.tensor([[0.3, 0.4, 0.3]]), 0.9, 3) == [[1]]


def test_tasks_of_equal_weight_stand_in_the_order_of_the_recipe():
    assert select(torch.full((1, 4), 0.25), 0.2, 4) == [[0, 1, 2, 3]]


def test_k_above_the_number_of_tasks_is_all_of_them():
    assert select(torch.tensor([[0.6, 0.4]]), 0.0, 9) == [[0, 1]]


@given(seeds, st.floats(0, 1), st.integers(1, 6))
def test_a_set_is_never_empty_never_above_k_and_sorted_by_weight(seed, threshold, top_k):
    weights = weigh(residuals(seed))
    for row, picked in zip(weights, select(weights, threshold, top_k), strict=True):
        assert 1 <= len(picked) <= top_k
        assert [float(row[t]) for t in picked] == sorted((float(row[t]) for t in picked), reverse=True)
        assert picked[0] == int(row.argmax())


# Algorithm 1


def algorithm_1(z, bases, threshold, k):
    """Lines 2 to 7 as printed: residuals, softmax, threshold, top k."""
    r = [float((z - v.mT @ v @ z).norm()) for v in bases]
    total = sum(2.718281828459045**-x for x in r)
    w = [2.718281828459045**-x / total for x in r]
    chosen = [i for i in range(len(bases)) if w[i] >= threshold]
    return sorted(chosen, key=lambda i: -w[i])[:k]


@given(seeds, st.integers(1, 6), st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5]))
def test_plain_softmax_with_k_of_all_tasks_is_algorithm_1_to_the_letter(seed, tasks, threshold):
    d = 12
    bases = [orthonormal(1 + i % 3, d, seed + 7 * i) for i in range(tasks)]
    z = torch.randn(6, d, generator=torch.Generator().manual_seed(seed + 1))
    found = select(weigh(ProjectionRouter(bases)(z), standardized=False), threshold, tasks)
    for row, picked in zip(z, found, strict=True):
        expected = algorithm_1(row.double(), [v.double() for v in bases], threshold, tasks)
        assert picked == (expected or picked[:1])  # the paper leaves open what an empty set means
        assert expected or picked == algorithm_1(row.double(), [v.double() for v in bases], 0.0, 1)


def test_between_two_tasks_the_voter_that_sees_the_greater_difference_decides():
    clear, faint = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.01, 1.0]])
    for voters in ([clear, faint], [faint, clear], [clear, faint, faint]):
        assert vote(voters).argmin().item() == 0


@given(seeds)
def test_between_two_tasks_the_scale_of_a_voter_does_not_matter(seed):
    a, b = residuals(seed, tasks=2), residuals(seed + 1, tasks=2)
    assert torch.allclose(vote([a, b]), vote([1000 * a, b]), atol=1e-5)


def test_two_tasks_that_no_voter_can_tell_apart_get_equal_votes():
    assert torch.equal(vote([torch.ones(3, 2), torch.zeros(3, 2)]), torch.zeros(3, 2))
