"""The projection router against its definitions: what remains of an activation after each task's subspace."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from massmerge.routing.projection import ProjectionRouter, mahalanobis_whitener, of_common_rank, site_basis
from massmerge.routing.separation import without_common

seeds = st.integers(0, 10_000)
D = 16


def generator(seed):
    return torch.Generator().manual_seed(seed)


def orthonormal(k, seed, d=D):
    return torch.linalg.qr(torch.randn(d, k, generator=generator(seed))).Q.mT


def bases_of(seed, ranks=(3, 5, 1)):
    return [orthonormal(k, seed + 31 * i) for i, k in enumerate(ranks)]


def remainders(z, bases):
    """`z − VᵀVz` for each task, in float64: (T, batch, d)."""
    z = z.double()
    return torch.stack([z - (v.double().mT @ v.double() @ z.mT).mT for v in bases])


def activations(seed, batch=4, scale=1.0):
    return torch.randn(batch, D, generator=generator(seed + 5)) * scale


# Residual


@given(seeds, st.sampled_from([1e-3, 1.0, 30.0]))
def test_the_residual_is_the_length_of_what_remains(seed, scale):
    bases, z = bases_of(seed), activations(seed, scale=scale)
    expected = remainders(z, bases).norm(dim=2).mT
    assert torch.allclose(ProjectionRouter(bases)(z).double(), expected, rtol=1e-5, atol=1e-5 * scale)


@given(seeds, st.sampled_from([0.0, 1e-6, 1e-4, 1e-3, 1e-2]))
def test_the_residual_of_an_activation_almost_inside_a_subspace_is_as_exact(seed, outside):
    bases = bases_of(seed)
    z = torch.randn(4, 5, generator=generator(seed)) @ bases[1]
    z = z + outside * activations(seed)
    expected = remainders(z, bases).norm(dim=2).mT
    assert float((ProjectionRouter(bases)(z).double() - expected).abs().max()) < 1e-5


def test_a_task_that_changes_nothing_at_the_site_leaves_the_whole_activation():
    z = activations(1)
    found = ProjectionRouter([orthonormal(3, 1), torch.zeros(0, D)])(z)
    assert torch.allclose(found[:, 1], z.norm(dim=1), atol=1e-6)
    assert bool((found[:, 0] < found[:, 1]).all())


@pytest.mark.parametrize("score", ["residual", "l1", "energy", "mahalanobis"])
def test_an_activation_of_zeros_gives_zeros(score):
    found = ProjectionRouter(bases_of(3), score)(torch.zeros(2, D))
    assert torch.equal(found.abs(), torch.zeros(2, 3))


@pytest.mark.parametrize("score", ["residual", "l1", "energy", "mahalanobis"])
def test_tasks_that_all_change_nothing_at_the_site_are_alike(score):
    found = ProjectionRouter([torch.zeros(0, D)] * 3, score)(activations(2))
    assert bool(torch.isfinite(found).all())
    assert torch.equal(found[:, 0], found[:, 1])
    assert torch.equal(found[:, 0], found[:, 2])


@pytest.mark.parametrize("score", ["residual", "l1", "energy", "mahalanobis"])
def test_identical_experts_have_identical_scores(score):
    one = orthonormal(4, 9)
    found = ProjectionRouter([one, orthonormal(4, 8), one], score)(activations(4))
    assert torch.allclose(found[:, 0], found[:, 2], atol=1e-6)


@pytest.mark.parametrize("score", ["residual", "l1", "energy", "mahalanobis"])
def test_a_single_vector_of_a_single_task_is_scored(score):
    found = ProjectionRouter([orthonormal(1, 1)], score)(activations(1))
    assert found.shape == (4, 1)
    assert bool(torch.isfinite(found).all())


# The paper's proposition


@given(seeds, st.floats(0.1, 10))
def test_the_least_residual_is_the_map_estimate_under_isotropic_gaussian_noise(seed, sigma):
    bases, z = bases_of(seed, (2, 2, 2, 2)), activations(seed)
    log_prior = math.log(1 / 4)
    errors = remainders(z, bases)
    # log N(ε; 0, σ²I), written out
    likelihood = -0.5 * errors.square().sum(2) / sigma**2 - 0.5 * D * math.log(2 * math.pi * sigma**2)
    posterior = torch.softmax(likelihood + log_prior, 0)
    residuals = ProjectionRouter(bases)(z)
    two = residuals.sort(1).values
    clear = two[:, 1] - two[:, 0] > 1e-3
    assert torch.equal(residuals.argmin(1)[clear], posterior.argmax(0)[clear])


# Other scores


@given(seeds)
def test_l1_is_the_sum_of_absolute_values_of_what_remains(seed):
    bases, z = bases_of(seed), activations(seed)
    expected = remainders(z, bases).abs().sum(2).mT
    assert torch.allclose(ProjectionRouter(bases, "l1")(z).double(), expected, atol=1e-5)


@given(seeds)
def test_energy_is_the_captured_length_with_its_sign_turned(seed):
    bases, z = bases_of(seed), activations(seed)
    expected = torch.stack([(z.double() @ v.double().mT).norm(dim=1) for v in bases], 1)
    assert torch.allclose(ProjectionRouter(bases, "energy")(z).double(), -expected, atol=1e-5)


@given(seeds)
def test_energy_and_residual_agree_on_the_order_of_tasks(seed):
    bases, z = bases_of(seed), activations(seed)
    residual, energy = ProjectionRouter(bases)(z), ProjectionRouter(bases, "energy")(z)
    assert torch.allclose(residual.square() + energy.square(), z.square().sum(1, keepdim=True), atol=1e-4)


@given(seeds)
def test_mahalanobis_is_the_length_of_what_remains_in_the_inverse_second_moment_of_all_vectors(seed):
    bases, z = bases_of(seed, (8, 8, 8)), activations(seed)
    vectors = torch.cat(bases).double()
    moment = sum(torch.outer(v, v) for v in vectors) / len(vectors)
    inverse = torch.linalg.inv(moment + 1e-3 * moment.diagonal().mean() * torch.eye(D))
    errors = remainders(z, bases)
    expected = torch.einsum("tbd,de,tbe->bt", errors, inverse, errors).sqrt()
    found = ProjectionRouter(bases, "mahalanobis")(z).double()
    assert float(((found - expected) / expected).abs().max()) < 1e-4


@pytest.mark.parametrize("score", ["residual", "l1", "energy", "mahalanobis"])
@given(seed=seeds, ranks=st.sampled_from([(3, 5, 1), (8, 8, 8)]))
def test_no_score_depends_on_the_signs_of_singular_vectors(score, seed, ranks):
    bases, z = bases_of(seed, ranks), activations(seed)
    signs = [torch.randint(2, (len(v), 1), generator=generator(seed + i)) * 2.0 - 1 for i, v in enumerate(bases)]
    flipped = [sign * v for sign, v in zip(signs, bases, strict=True)]
    assert torch.allclose(ProjectionRouter(flipped, score)(z), ProjectionRouter(bases, score)(z), rtol=1e-4, atol=1e-5)


def test_the_second_moment_of_fewer_vectors_than_dimensions_is_made_invertible():
    assert bool(torch.isfinite(mahalanobis_whitener(orthonormal(2, 1))).all())


# One rank for all tasks


SCORES = ["residual", "l1", "energy", "mahalanobis"]


def routed(bases, score="residual"):
    """The router of a site, as a loaded bundle makes it."""
    return ProjectionRouter(without_common(of_common_rank(bases)), score)


@pytest.mark.parametrize("score", SCORES)
@given(seed=seeds, least=st.integers(4, 6), more=st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_vectors_beyond_the_common_rank_change_no_score_and_no_lift(score, seed, least, more):
    bases, z = bases_of(seed, [least + 6] * 3), activations(seed)
    expected, found = (routed(own, score) for own in ([v[:least] for v in bases],
        [bases[0][:least], *(v[: least + m] for v, m in zip(bases[1:], more[1:], strict=True))]))  # fmt: skip
    assert torch.equal(found(z), expected(z))
    assert torch.equal(found.lift(z, found(z)), expected.lift(z, expected(z)))


@pytest.mark.parametrize("score", SCORES)
@given(seed=seeds, order=st.permutations(range(4)))
def test_another_order_of_the_tasks_gives_the_same_scores_in_that_order(score, seed, order):
    bases, z = bases_of(seed, (3, 5, 2, 0)), activations(seed)
    expected, found = routed(bases, score)(z), routed([bases[i] for i in order], score)(z)
    assert torch.allclose(found, expected[:, list(order)], rtol=1e-4, atol=1e-5)


def test_the_common_rank_is_that_of_the_smallest_task_that_changes_something():
    ranks = [len(v) for v in of_common_rank(bases_of(1, (7, 5, 0, 8)))]
    assert ranks == [5, 5, 0, 5]


def test_a_task_with_one_vector_leaves_the_others_four():
    assert [len(v) for v in of_common_rank(bases_of(1, (5, 1, 8)))] == [4, 1, 4]


def test_the_first_vectors_are_kept():
    bases = bases_of(1, (8, 5))
    assert torch.equal(of_common_rank(bases)[0], bases[0][:5])


def test_no_more_vectors_than_asked_for_but_never_fewer_than_four():
    bases = bases_of(1, (8, 7, 0))
    assert [len(v) for v in of_common_rank(bases, 5)] == [5, 5, 0]
    assert [len(v) for v in of_common_rank(bases, 2)] == [4, 4, 0]
    assert [len(v) for v in of_common_rank(bases, 20)] == [7, 7, 0]


@given(seeds)
def test_a_lower_lift_is_a_larger_residual_also_where_a_task_has_fewer_vectors(seed):
    router, z = ProjectionRouter(of_common_rank(bases_of(seed, (5, 1, 8)))), activations(seed)
    scores = router(z)
    assert torch.equal(router.lift(z, scores).argsort(1), scores.argsort(1, descending=True))


@pytest.mark.parametrize("score", SCORES)
@given(seed=seeds)
def test_a_second_task_with_the_same_vectors_changes_no_score_of_the_others(score, seed):
    bases, z = bases_of(seed, (3, 3, 3)), activations(seed)
    twice = ProjectionRouter([*bases, bases[1]], score, targets=[0, 1, 2, 1])(z)
    expected = ProjectionRouter(bases, score)(z)
    assert torch.allclose(twice, expected[:, [0, 1, 2, 1]], rtol=1e-4, atol=1e-5)


# Several layers that read one activation


@given(seeds)
def test_the_subspace_of_several_layers_is_that_of_their_stacked_deltas(seed):
    deltas = [torch.randn(6, D, generator=generator(seed + i)) for i in range(3)]
    factors = [torch.linalg.svd(delta, full_matrices=False) for delta in deltas]
    found = site_basis([(s, v) for _, s, v in factors], 4)
    expected = torch.linalg.svd(torch.cat(deltas), full_matrices=False)[2][:4]
    assert torch.allclose(found.mT @ found, expected.mT @ expected, atol=1e-3)


def test_the_subspace_of_one_layer_is_its_singular_vectors():
    v = orthonormal(4, 1)
    assert torch.equal(site_basis([(torch.ones(4), v)], 2), v)


def test_layers_that_change_the_same_direction_give_one_vector():
    v = orthonormal(1, 3)
    found = site_basis([(torch.tensor([2.0]), v), (torch.tensor([3.0]), -v)], 2)
    assert found.shape == (1, D)
    assert torch.allclose(found.abs(), v.abs(), atol=1e-6)


def test_rows_of_a_subspace_are_orthonormal_even_where_the_layers_overlap():
    v, w = orthonormal(3, 1), orthonormal(3, 1)[:2]
    found = site_basis([(torch.ones(3), v), (torch.ones(2), w)], 3)
    assert torch.allclose(found @ found.mT, torch.eye(len(found)), atol=1e-5)


def test_layers_whose_factors_are_all_zero_give_no_vector():
    v = orthonormal(2, 3)
    assert site_basis([(torch.zeros(2), v), (torch.zeros(2), v)], 2).shape == (0, D)
