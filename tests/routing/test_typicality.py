"""How far inputs are from those that a calibration has seen."""

import pytest
import torch
from torch.nn.functional import normalize

from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.typicality import _SHRINKAGE, Typicality, fit_space, fit_typicality, log_distances


def inputs_of(tasks, count, width=24, seed=0):
    draw = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(tasks, width, generator=torch.Generator().manual_seed(9))
    owners = torch.arange(tasks).repeat_interleave(count)
    return centres[owners] + torch.randn(len(owners), width, generator=draw), owners


def subspaces_of(tasks, width=24):
    """Each task's holds its centre."""
    centres = torch.randn(tasks, width, generator=torch.Generator().manual_seed(9))
    return ProjectionRouter([normalize(centre, dim=0)[None] for centre in centres])


def naive_log_distances(z, owners, tasks, queries):
    units, asked = normalize(z.double(), dim=1), normalize(queries.double(), dim=1)
    means = torch.stack([units[owners == t].mean(0) for t in range(tasks)])
    scatter = units - means[owners]
    covariance = scatter.mT @ scatter / (len(z) - tasks)
    shrunk = (1 - _SHRINKAGE) * covariance + _SHRINKAGE * covariance.trace() / z.shape[1] * torch.eye(z.shape[1])
    return torch.tensor([[float((q - p) @ torch.linalg.inv(shrunk) @ (q - p)) for p in means] for q in asked]).log()


def test_distances_are_those_of_mahalanobis_with_a_shrunk_covariance():
    z, owners = inputs_of(3, 20)
    queries = torch.randn(5, 24)
    found = log_distances(queries, fit_space(z, owners, 3))
    torch.testing.assert_close(found, naive_log_distances(z, owners, 3, queries).float(), atol=1e-3, rtol=1e-3)


def test_directions_that_are_not_kept_count_alike(monkeypatch):
    monkeypatch.setattr("massmerge.routing.typicality._DIRECTIONS", 0)
    z, owners = inputs_of(2, 10)
    space = fit_space(z, owners, 2)
    units = normalize(z, dim=1)
    expected = (space["floor"] * (units[:, None] - space["means"]).square().sum(2)).log()
    torch.testing.assert_close(log_distances(z, space), expected)


@pytest.fixture
def typical():
    looks = [inputs_of(4, 16, seed=seed) for seed in (0, 1)]
    kept, _ = fit_typicality(["a", "b"], [z for z, _ in looks], looks[0][1], 4, [subspaces_of(4)] * 2)
    return Typicality.load(["a", "b"], kept, [subspaces_of(4)] * 2)


def test_known_inputs_are_typical_and_others_are_not(typical):
    known, _ = inputs_of(4, 50, seed=7)
    foreign = 3 * torch.randn(200, 24, generator=torch.Generator().manual_seed(3))
    assert typical([known, known], range(4)).mean() > 0.3
    assert typical([foreign, foreign], range(4)).mean() < 0.02


def test_about_a_tenth_of_known_inputs_is_less_typical_than_a_tenth(typical):
    known, _ = inputs_of(4, 200, seed=7)
    assert float((typical([known, known], range(4)) < 0.1).float().mean()) < 0.25


def test_inputs_of_a_task_that_is_not_in_question_are_foreign(typical):
    known, owners = inputs_of(4, 50, seed=7)
    found = typical([known, known], [0, 1, 2])
    assert found[owners == 3].mean() < 0.05 < found[owners != 3].mean()


def test_without_a_voters_space_there_is_none():
    z, owners = inputs_of(2, 8)
    assert Typicality.load(["a", "b"], fit_typicality(["a"], [z], owners, 2, [subspaces_of(2)])[0], []) is None


def test_one_input_a_task_is_enough_to_fit():
    z, owners = inputs_of(3, 1)
    kept, left_out = fit_typicality(["a"], [z], owners, 3, [subspaces_of(3)])
    found = Typicality.load(["a"], kept, [subspaces_of(3)])
    assert len(left_out) == 0
    assert found([z], range(3)).isfinite().all()


def test_typicality_of_inputs_that_are_left_out_is_that_of_new_ones():
    z, owners = inputs_of(4, 100)
    kept, left_out = fit_typicality(["a"], [z], owners, 4, [subspaces_of(4)])
    new = Typicality.load(["a"], kept, [subspaces_of(4)])([inputs_of(4, 500, seed=7)[0]], range(4))
    limit = left_out.quantile(0.1)
    assert len(left_out) == 400
    assert float((new < limit).float().mean()) == pytest.approx(0.1, abs=0.04)
