"""The router of all voters together: logistic regression on what they see, and on the vote of the residuals."""

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from massmerge.routing import Activation
from massmerge.routing.linear import Linear, fit_logistic, residual_vote, whitener
from massmerge.routing.per_voter import PerVoter
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.prototype import PrototypeRouter
from massmerge.routing.selection import standardize

TASKS, WIDTHS = 3, (6, 4)
VOTERS = ["M0.mean", "O1.mean"]


def bases(width, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.linalg.qr(torch.randn(width, 2, generator=generator)).Q.mT for _ in range(TASKS)]


SUBSPACES = [ProjectionRouter(bases(width, seed)) for seed, width in enumerate(WIDTHS)]


def cloud(seed, count=60):
    """What two voters see of inputs around a centre for each task, and the task of each."""
    generator, owners = torch.Generator().manual_seed(seed), torch.arange(count) % TASKS
    centres = [torch.randn(TASKS, w, generator=torch.Generator().manual_seed(9)) for w in WIDTHS]
    return [c[owners] + 1 + 0.4 * torch.randn(count, c.shape[1], generator=generator) for c in centres], owners


def fitted(seed=0):
    seen, owners = cloud(seed)
    return Linear().fit(VOTERS, seen, owners, SUBSPACES)


def opinion(kept, seen):
    (scores,) = Linear().load(VOTERS, kept, SUBSPACES)([Activation(z) for z in seen]).opinions
    return scores


def test_inputs_that_were_not_seen_find_their_task():
    seen, owners = cloud(1)
    assert float((opinion(fitted(), seen).argmin(1) == owners).float().mean()) > 0.95


def test_scores_are_negative_log_probabilities():
    seen, _ = cloud(1)
    assert torch.allclose((-opinion(fitted(), seen)).exp().sum(1), torch.ones(60), atol=1e-5)
    assert Linear().load(VOTERS, fitted(), SUBSPACES)([Activation(z) for z in seen]).probable


def test_whitening_and_centring_are_taken_into_the_weights():
    (seen, owners), (asked, _) = cloud(0), cloud(1)

    def features(given):
        units, own = [normalize(z, dim=1) for z in given], [normalize(z, dim=1) for z in seen]
        parts = [
            (u - o.mean(0)) @ whitener(o, owners, TASKS) / sum(WIDTHS) ** 0.5 for u, o in zip(units, own, strict=True)
        ]
        return torch.cat([*parts, 0.3 * residual_vote(units, SUBSPACES)], 1)

    weight, bias = fit_logistic(features(seen), owners, TASKS)
    expected = -(features(asked) @ weight.mT + bias).log_softmax(1)
    assert torch.allclose(opinion(without_prototypes(fitted()), asked), expected, atol=0.05)


def without_prototypes(kept):
    """As older bundles keep it."""
    return {name: tensor for name, tensor in kept.items() if not name.endswith(".share")}


def test_the_fewer_inputs_the_more_the_prototypes_count():
    (seen, owners), (asked, _) = cloud(0), cloud(1)
    kept, each = fitted(), PerVoter(PrototypeRouter)
    near = each.load(VOTERS, each.fit(VOTERS, seen, owners, SUBSPACES), SUBSPACES)([Activation(z) for z in asked])
    share = 128 / (len(owners) / TASKS)
    logits = -opinion(without_prototypes(kept), asked) - share * standardize(torch.stack(near.opinions)).mean(0)
    assert torch.allclose(opinion(kept, asked), -logits.log_softmax(1), atol=1e-4)


def test_a_whitener_makes_the_scatter_within_tasks_even_but_for_the_shrinkage():
    generator, owners = torch.Generator().manual_seed(0), torch.arange(3000) % TASKS
    units = torch.randn(3000, 3, generator=generator) * torch.tensor([3.0, 1.0, 0.1])
    spread = (units @ whitener(units, owners, TASKS)).std(0)
    mean = (9 + 1 + 0.01) / 3
    expected = [(v / (0.5 * v + 0.5 * mean)) ** 0.5 for v in (9, 1, 0.01)]
    assert spread.tolist() == pytest.approx(expected, rel=0.05)


def test_the_weights_have_the_least_cross_entropy_with_the_ridge():
    seen, owners = cloud(0)
    weight, bias = fit_logistic(seen[0], owners, TASKS, ridge=0.1)

    def loss(w, b):
        return float(cross_entropy(seen[0] @ w.mT + b, owners) + 0.05 * w.square().sum())

    best, generator = loss(weight, bias), torch.Generator().manual_seed(3)
    for _ in range(20):
        w, b = (0.05 * torch.randn(t.shape, generator=generator) for t in (weight, bias))
        assert loss(weight + w, bias + b) > best


def test_a_task_with_few_inputs_counts_as_much_as_one_with_many():
    z = torch.cat([torch.full((90, 1), -1.0), torch.full((10, 1), 1.0)])
    owners = (torch.arange(100) >= 90).long()
    weight, bias = fit_logistic(z, owners, 2, ridge=0.1)
    chances = (z @ weight.mT + bias).softmax(1)
    assert float(chances[0, 0]) == pytest.approx(float(chances[-1, 1]), abs=1e-3)


def test_the_same_inputs_fit_the_same_weights():
    first, second = fitted(), fitted()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_vote_is_the_mean_of_the_standardised_residuals():
    seen, _ = cloud(2)
    expected = sum(standardize(own(z)) for own, z in zip(SUBSPACES, seen, strict=True)) / 2
    assert torch.allclose(residual_vote(seen, SUBSPACES), expected)


def test_a_router_of_other_voters_is_missing_for_all_of_them():
    assert Linear().missing(VOTERS, fitted()) == []
    assert Linear().missing(["M0.mean", "M1.mean"], fitted()) == ["M0.mean", "M1.mean"]
