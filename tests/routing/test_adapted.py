"""Routing that has seen mixed inputs without names, and whether two halves of the voters say that it got better."""

import pytest
import torch
from torch.nn.functional import normalize

from massmerge.routing import Activation
from massmerge.routing.adapted import NEIGHBOURS, AdaptedRouter, balanced_moments, fit_adapted
from massmerge.routing.linear import residual_vote
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.two_views import agreement, better, mutual_information

WIDTH, TASKS, VOTERS = 24, 3, 4


@pytest.fixture(scope="module")
def subspaces():
    draw = torch.Generator().manual_seed(0)
    bases = [
        [torch.linalg.qr(torch.randn(WIDTH, 4, generator=draw))[0].mT for _ in range(TASKS)] for _ in range(VOTERS)
    ]
    return [ProjectionRouter(own) for own in bases]


def inputs_of(subspaces, counts, noise=0.4, seed=1):
    """What voters see of inputs of each task, and their tasks; all inputs have a direction in common."""
    draw = torch.Generator().manual_seed(seed)
    owners = torch.cat([torch.full((n,), t) for t, n in enumerate(counts)])
    seen = []
    for own in subspaces:
        along = torch.stack([own.bases[t].mT @ torch.randn(4, generator=draw) / 2 for t in owners.tolist()])
        seen.append(along + own.bases[0][0] + noise * torch.randn(len(owners), WIDTH, generator=draw) / WIDTH**0.5)
    return seen, owners


def accuracy(router, seen, owners):
    found = router([Activation(z) for z in seen]).opinions[0].argmin(1)
    return float(torch.stack([(found == owners)[owners == t].float().mean() for t in set(owners.tolist())]).mean())


def plain(subspaces):
    """The router with neither step."""
    seen, _ = inputs_of(subspaces, (5, 5, 5))
    return AdaptedRouter(fit_adapted(seen, subspaces, standardized=False, smooth=False), subspaces)


def test_what_all_inputs_have_in_common_speaks_for_no_task_any_more(subspaces):
    seen, _ = inputs_of(subspaces, (80, 80, 80))
    adapted = AdaptedRouter(fit_adapted(seen, subspaces, smooth=False), subspaces)
    asked = inputs_of(subspaces, (80, 80, 80), seed=2)
    assert accuracy(adapted, *asked) > accuracy(plain(subspaces), *asked) + 0.1


def test_neither_step_leaves_the_vote_of_the_residuals(subspaces):
    seen, _ = inputs_of(subspaces, (5, 5, 5), seed=3)
    found = plain(subspaces)([Activation(z) for z in seen]).opinions[0]
    torch.testing.assert_close(found, residual_vote([normalize(z, dim=1) for z in seen], subspaces))


def test_an_input_counts_as_much_as_its_nearest_neighbours_together(subspaces):
    seen, _ = inputs_of(subspaces, (20, 20, 20))
    kept = fit_adapted(seen, subspaces)
    asked, _ = inputs_of(subspaces, (2, 2, 2), seed=5)
    units = torch.cat([normalize(z, dim=1) for z in asked], 1)
    vote = residual_vote([normalize(z, dim=1) for z in asked], subspaces)
    found = AdaptedRouter(kept, subspaces)([Activation(z) for z in asked]).opinions[0]
    for i, unit in enumerate(units):
        place = kept["directions"].float() @ (unit - kept["middle"].float())
        near = sorted(range(60), key=lambda j: -float(torch.cosine_similarity(place, kept["bank"][j].float(), dim=0)))
        neighbours = kept["scores"][near[:NEIGHBOURS]].float().mean(0)
        expected = ((vote[i] - kept["centre"]) / kept["spread"] + neighbours) / 2
        torch.testing.assert_close(found[i], expected, atol=1e-3, rtol=1e-3)


def test_traffic_of_mostly_one_task_leaves_it_that_task(subspaces):
    clear = [ProjectionRouter(own.bases) for own in subspaces]
    seen, _ = inputs_of(clear, (300, 20, 20), noise=0.1)
    asked, owners = inputs_of(clear, (60, 60, 60), noise=0.1, seed=2)
    adapted = AdaptedRouter(fit_adapted(seen, clear, smooth=False), clear)
    found = adapted([Activation(z) for z in asked]).opinions[0].argmin(1)
    assert float((found == owners)[owners == 0].float().mean()) > 0.8


def test_balanced_moments_do_not_depend_on_how_many_inputs_a_task_has():
    vote = torch.tensor([[-1.0, 0.5, 0.6], [0.4, -1.0, 0.7], [0.3, 0.6, -1.0]]).repeat(10, 1)
    many = torch.cat([vote, vote[::3].repeat(5, 1)])
    for one, other in zip(balanced_moments(vote), balanced_moments(many), strict=True):
        torch.testing.assert_close(one, other)


def test_halves_that_say_the_same_of_everything_tell_nothing_of_each_other():
    one = torch.zeros(50, dtype=torch.long)
    assert mutual_information(one, one, 3) == 0
    even = torch.arange(60) % 3
    assert mutual_information(even, even, 3) == pytest.approx(torch.tensor(3.0).log().item())


def test_better_is_to_agree_more_than_by_chance_and_tell_as_much():
    draw = torch.Generator().manual_seed(0)
    truth = torch.randint(3, (400,), generator=draw)

    def view(right):
        wrong = torch.rand(400, generator=draw) > right
        return torch.where(wrong, (truth + 1 + torch.randint(2, (400,), generator=draw)) % 3, truth)

    before = view(0.7), view(0.7)
    after = view(0.9), view(0.9)
    assert better(before, after, 3)
    assert not better(after, before, 3)
    assert not better(before, (view(0.7), view(0.7)), 3)
    one = torch.zeros_like(truth)
    assert agreement((one, one)) == 1
    assert not better(before, (one, one), 3)
