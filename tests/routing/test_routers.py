"""The routers that are fitted on a few inputs of each task: activations in, scores out; less is better."""

import shutil
from typing import get_args, get_type_hints

import pytest
import torch
from torch.nn.functional import normalize

import massmerge
from massmerge.model.calibrate import calibrate
from massmerge.recipe import RouterOptions
from massmerge.routing import select, weigh
from massmerge.routing.mlp import MlpRouter, fit_mlp
from massmerge.routing.nearest import NearestRouter
from massmerge.routing.per_voter import PerVoter
from massmerge.routing.prototype import PrototypeRouter, fit_prototypes
from massmerge.routing.routers import ROUTERS
from models import text_bundle

D, TASKS = 12, 3
OWNERS = torch.arange(30) % TASKS


def cloud(seed=0, spread=0.3):
    """Activations around a centre for each task, on top of what all tasks share."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(TASKS, D, generator=torch.Generator().manual_seed(99))
    return centres[OWNERS] + 2.0 + spread * torch.randn(30, D, generator=generator)


def router_of(kind, z=None):
    z = cloud() if z is None else z
    if kind == "nearest":
        return NearestRouter(z, OWNERS, TASKS)
    if kind == "prototype":
        return PrototypeRouter(**fit_prototypes(z, OWNERS, TASKS))
    return MlpRouter(fit_mlp(z, OWNERS, TASKS))


KINDS = ["nearest", "prototype", "mlp"]


@pytest.mark.parametrize("kind", KINDS)
def test_activations_that_were_not_seen_find_their_task(kind):
    assert torch.equal(router_of(kind)(cloud(1)).argmin(1), OWNERS)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_have_a_row_an_input_and_a_column_a_task(kind):
    assert router_of(kind)(cloud(1)).shape == (30, TASKS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_length_of_an_activation_does_not_matter(kind):
    router = router_of(kind)
    assert torch.allclose(router(cloud(1) * 50), router(cloud(1)), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_of_zeros_gives_no_nan(kind):
    assert bool(torch.isfinite(router_of(kind)(torch.zeros(2, D))).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_support_set_of_zeros_gives_no_nan(kind):
    assert bool(torch.isfinite(router_of(kind, torch.zeros(30, D))(cloud(1))).all())


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_inputs_fit_the_same_router(kind):
    torch.manual_seed(1)
    first = router_of(kind)(cloud(1))
    torch.manual_seed(2)
    assert torch.equal(router_of(kind)(cloud(1)), first)


@pytest.mark.parametrize("kind", KINDS)
def test_selection_takes_the_scores_of_every_router(kind):
    chosen = select(weigh(router_of(kind)(cloud(1))), 0.2, 1)
    assert [tasks[0] for tasks in chosen] == OWNERS.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_task_is_scored(kind):
    z, owners = cloud()[:4], torch.zeros(4, dtype=torch.long)
    routers = {
        "nearest": lambda: NearestRouter(z, owners, 1),
        "prototype": lambda: PrototypeRouter(**fit_prototypes(z, owners, 1)),
        "mlp": lambda: MlpRouter(fit_mlp(z, owners, 1, steps=3)),
    }
    found = routers[kind]()(z)
    assert found.shape == (4, 1)
    assert bool(torch.isfinite(found).all())


def test_nearest_is_the_cosine_distance_to_the_nearest_activation_of_each_task():
    support, z = cloud(), cloud(1)
    found = NearestRouter(support, OWNERS, TASKS)(z)
    for i, row in enumerate(z):
        for task in range(TASKS):
            cosines = [torch.cosine_similarity(row, s, dim=0) for s in support[task::TASKS]]
            assert abs(float(found[i, task]) - (1 - float(max(cosines)))) < 1e-5


def test_differences_of_prototype_scores_are_those_of_distances_in_the_metric_of_the_scatter_within_tasks():
    z, asked = cloud(), normalize(cloud(1), dim=1).double()
    units = normalize(z, dim=1).double()
    means = torch.stack([units[task::TASKS].mean(0) for task in range(TASKS)])
    scatter = torch.stack([u - means[i % TASKS] for i, u in enumerate(units)])
    covariance = sum(torch.outer(row, row) for row in scatter) / len(units)
    metric = torch.linalg.inv(0.2 * covariance / covariance.diagonal().mean() + 0.8 * torch.eye(D))
    distances = torch.stack([torch.stack([(row - p) @ metric @ (row - p) / 2 for p in means]) for row in asked])
    found = PrototypeRouter(**fit_prototypes(z, OWNERS, TASKS))(cloud(1)).double()
    assert torch.allclose(found - found[:, :1], distances - distances[:, :1], atol=1e-4)


def halves(z):
    """Residuals that know the first half of an activation only, as those of subspaces do, which leave directions out."""
    centres = torch.randn(TASKS, D, generator=torch.Generator().manual_seed(99))[:, : D // 2]
    return torch.cdist(z[:, : D // 2], normalize(centres + 2.0, dim=1) / 2)


def test_prototype_and_residual_count_by_what_is_usual_for_each():
    z, asked = cloud(), cloud(1)
    fitted = fit_prototypes(z, OWNERS, TASKS, halves)
    units = [normalize(x, dim=1) for x in (z, asked)]
    alone = PrototypeRouter(fitted["weight"], fitted["offset"])
    usual = [torch.stack([row.std() for row in scores(units[0])]).mean() for scores in (halves, alone)]
    expected = halves(units[1]) / usual[0] + 0.75 * alone(asked) / usual[1]
    assert torch.allclose(PrototypeRouter(**fitted, residuals=halves)(asked), expected, atol=1e-4)


def test_between_two_tasks_the_surer_of_prototype_and_residual_decides():
    z, owners = cloud()[OWNERS < 2], OWNERS[OWNERS < 2]
    fitted = fit_prototypes(z, owners, 2, lambda u: torch.stack([u[:, 0], -u[:, 0]], 1))

    def decided(lead):
        router = PrototypeRouter(**fitted, residuals=lambda u: torch.tensor([[0.0, lead]]).expand(len(u), 2))
        return router(cloud(1)[OWNERS == 1]).argmin(1).tolist()

    assert decided(0.0) == [1] * 10
    assert decided(100.0) == [0] * 10


def test_residuals_that_are_all_alike_leave_the_decision_to_the_prototypes():
    fitted = fit_prototypes(cloud(), OWNERS, TASKS, lambda u: torch.ones(len(u), TASKS))
    assert fitted["scales"][0] == 0
    assert torch.equal(PrototypeRouter(**fitted, residuals=halves)(cloud(1)).argmin(1), OWNERS)


def test_prototypes_of_older_bundles_decide_alone():
    fitted = fit_prototypes(cloud(), OWNERS, TASKS)
    assert torch.equal(PrototypeRouter(**fitted, residuals=halves)(cloud(1)), PrototypeRouter(**fitted)(cloud(1)))


def test_one_input_a_task_is_compared_by_plain_distance():
    z = cloud()[:TASKS]
    found = PrototypeRouter(**fit_prototypes(z, torch.arange(TASKS), TASKS))(z)
    assert found.argmin(1).tolist() == list(range(TASKS))


def test_the_network_has_the_paper_s_two_layers_of_1024():
    shapes = {name: tuple(t.shape) for name, t in fit_mlp(cloud(), OWNERS, TASKS, steps=1).items()}
    assert shapes == {"0.weight": (1024, D), "0.bias": (1024,), "3.weight": (TASKS, 1024), "3.bias": (TASKS,)}


def test_the_network_drops_nothing_out_when_it_routes():
    router = router_of("mlp")
    assert torch.equal(router(cloud(1)), router(cloud(1)))


def test_training_the_network_leaves_the_random_numbers_of_the_caller_alone():
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    fit_mlp(cloud(), OWNERS, TASKS, steps=2)
    assert torch.equal(torch.rand(3), expected)


# The names they have


def test_recipes_know_every_router():
    kinds = get_type_hints(RouterOptions)["kind"]
    assert sorted(get_args(kinds)) == sorted(ROUTERS)


class FarthestRouter(NearestRouter):
    """A router that is worse than chance."""

    def __call__(self, z):
        return -super().__call__(z)


def test_a_new_router_is_one_line_in_the_dictionary(root, tmp_path, monkeypatch):
    monkeypatch.setitem(ROUTERS, "farthest", PerVoter(FarthestRouter))
    monkeypatch.setattr("massmerge.model.calibrate.KINDS", ["farthest"])
    bundle = shutil.copytree(text_bundle(root), tmp_path / "bundle")
    tasks = massmerge.load(bundle).tasks
    calibrate(bundle, {task: [f"{task} {task}", f"a {task}"] for task in tasks}, kind="farthest")
    found = massmerge.load(bundle).route("win free prize")[0]
    assert massmerge.load(bundle).stages.first.router.routers[0].__class__ is FarthestRouter
    assert found.lift is None and set(found.residuals) == set(tasks)
