"""A closer look at images of which the first blocks are not sure, against bundles whose voters are named."""

import copy
import dataclasses

import pytest
import torch

from answers import vit_images
from massmerge.model.route.decide import Choice, cast_votes, count_votes
from massmerge.model.route.first_pass import Voter
from massmerge.model.route.stages import SecondLook
from massmerge.recipe import RouterOptions, Unknown
from massmerge.routing import Activation, margins, standardize
from massmerge.routing.confidence import TEXTS
from massmerge.routing.per_voter import VotingRouter
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.sites import Site


def same(found, expected):
    return dataclasses.replace(
        found, residuals={}, weights={}, margin=None, lift=None, agreement=None, probabilities={}
    ) == (
        dataclasses.replace(
            expected, residuals={}, weights={}, margin=None, lift=None, agreement=None, probabilities={}
        )
    ) and found.residuals == pytest.approx(expected.residuals, abs=1e-4)


def test_inputs_with_a_small_margin_are_decided_in_all_blocks_and_the_others_in_the_first(load_vit):
    early = load_vit(unsure=0.0)
    everywhere = [site.name for site in early.sites if site.name[0] == "O"]
    deep = load_vit(site=everywhere)
    images = vit_images(early)
    first, second = early.route(images), deep.route(images)
    limit = sorted(routing.margin for routing in first)[len(images) // 2]
    found = load_vit(unsure=limit).route(images)
    unsure = [routing.margin < limit for routing in first]
    assert 0 < sum(unsure) < len(images)
    for one, a, b, closer in zip(found, first, second, unsure, strict=True):
        assert same(one, b if closer else a)


def test_a_closer_look_at_everything_is_a_vote_of_all_blocks(load_vit):
    model = load_vit(unsure=1e9)
    deep = load_vit(site=[site.name for site in model.sites if site.name[0] == "O"])
    images = vit_images(model)
    assert all(same(a, b) for a, b in zip(model.route(images), deep.route(images), strict=True))
    together = [p.routing for p in model.predict(images, route="batch")]
    assert all(same(a, b.routing) for a, b in zip(together, deep.predict(images, route="batch"), strict=True))


def test_what_is_decided_does_not_depend_on_the_others_in_the_batch(load_vit):
    model = load_vit(unsure=0.5)
    images = vit_images(model)
    alone = [model.route([image])[0] for image in images]
    assert all(same(a, b) for a, b in zip(model.route(images), alone, strict=True))


def test_inputs_of_tasks_that_look_alike_to_the_first_blocks_are_looked_at_again(load_vit):
    model = load_vit(unsure=1e-6, candidates=1)
    deep = load_vit(site=[site.name for site in model.sites if site.name[0] == "O"])
    images = vit_images(model)
    first, second = model.route(images), deep.route(images)
    one, other, *rest = range(len(model.tasks))
    model.stages.second._kin[one, other] = model.stages.second._kin[other, one] = True
    alike = [r.selected[0] in (model.tasks[one], model.tasks[other]) for r in first]
    assert 0 < sum(alike) < len(images)
    for found, a, b, again in zip(model.route(images), first, second, alike, strict=True):
        assert same(found, b if again else a)
    # A task that may not be chosen is mistaken for nothing.
    names = [model.tasks[i] for i in (one, *rest)]
    assert model.stages.second.needed([9.0], [one], [one, *rest]) == []
    assert all(same(a.routing, b.routing) for a, b in zip(
        model.predict(images, task=names), load_vit(unsure=1e-6, candidates=1).predict(images, task=names), strict=True
    ))  # fmt: skip


@pytest.mark.parametrize("router", [{"unsure": 0.0}, {"site": "M0"}, {"first_pass": "base", "site": ["O0", "M1"]}])
def test_named_voters_and_a_limit_of_nothing_have_no_closer_look(load_vit, router):
    assert load_vit(**router).stages.second is None


def test_the_routers_of_the_closer_look_are_made_once_and_only_when_needed(load_vit):
    made = []

    class First:
        voters = ()

    look = SecondLook(First(), lambda: made.append(1) or len(made), torch.zeros(2, 2, dtype=torch.bool), 0.3)
    assert made == []
    assert look.router == look.router == 1


@pytest.mark.parametrize("shared", [False, True])
def test_voters_that_share_a_router_decide_as_voters_with_routers_of_their_own(shared):
    torch.manual_seed(4)
    first, second = (ProjectionRouter([torch.linalg.qr(torch.randn(12, 3)).Q.mT for _ in range(4)]) for _ in range(2))
    site = Site("M0", ("layer.0",), 12, 0.0)
    voters = [Voter(site, token) for token in ("cls", "mean", "each", "cls")]
    seen = [Activation(torch.randn(5, 12)) for _ in voters]
    seen[2] = Activation(torch.randn(9, 12), torch.tensor([1, 2, 3, 1, 2]))
    choice = Choice(list("abcd"), [0, 1, 3], RouterOptions(), 2, Unknown(), TEXTS)
    names = [voter.name for voter in voters]
    one_router = VotingRouter([first, first, first, second], names)
    found = count_votes(cast_votes(voters, seen, one_router), choice, shared=shared)
    apart = [first, copy.copy(first), copy.copy(first), second]
    alone = count_votes(cast_votes(voters, seen, VotingRouter(apart, names)), choice, shared=shared)
    for one, other in zip(found, alone, strict=True):
        assert one.selected == other.selected
        assert one.residuals == pytest.approx(other.residuals, abs=1e-5)
        assert (one.lift, one.agreement, one.margin) == pytest.approx(
            (other.lift, other.agreement, other.margin), abs=1e-5
        )


def test_a_margin_is_the_lead_of_the_best_task_in_mean_standardised_residuals():
    scores = [torch.rand(5, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1, 2)]
    together = torch.stack([standardize(s) for s in scores]).mean(0)
    ordered = together.sort(1).values
    assert margins(scores) == pytest.approx((ordered[:, 1] - ordered[:, 0]).tolist())
    assert margins([torch.ones(2, 3)]) == [0.0, 0.0]
