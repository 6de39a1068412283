"""Tasks against what they hold of inputs of no task."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from massmerge.routing.neutral import NeutralRouter
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.prototype import SHARE, SHARE_ALIKE, PrototypeRouter

D = 16
seeds = st.integers(0, 10_000)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def orthonormal(k, seed):
    return torch.linalg.qr(torch.randn(D, k, generator=generator(seed))).Q.mT


def activations(seed, batch=4):
    return torch.randn(batch, D, generator=generator(seed + 5))


def against(z, neutral, bases):
    """The naive twin: of each activation and task, the captured share over the mean captured share of neutral ones."""

    def shares(rows):
        return torch.stack([(rows @ v.mT).norm(dim=1) ** 2 / rows.norm(dim=1) ** 2 for v in bases], 1)

    return shares(z) / shares(neutral).mean(0)


@given(seeds)
def test_a_task_counts_by_what_it_holds_beyond_its_share_of_neutral_activations(seed):
    bases, z, neutral = [orthonormal(4, seed + i) for i in range(3)], activations(seed), activations(seed + 1, 7)
    router = NeutralRouter(bases, neutral)
    expected = against(z, neutral, bases)
    assert torch.allclose(router(z), -expected.sqrt(), rtol=1e-4)
    assert torch.allclose(router.lift(z, router(z)), expected, rtol=1e-4)


@given(seeds)
def test_learned_subspaces_keep_the_order_of_their_residuals_and_the_best_its_level(seed):
    bases, z, neutral = [orthonormal(4, seed + i) for i in range(5)], activations(seed), activations(seed + 1, 7)
    own = ProjectionRouter([orthonormal(6, seed + 10 + i) for i in range(3)])
    found, held = NeutralRouter(bases, neutral, [0, 2, 3], own)(z), -against(z, neutral, bases).sqrt()
    residuals = own(z)
    for row, (scores, plain, left) in enumerate(zip(found, held, residuals, strict=True)):
        assert torch.equal(scores[[0, 2, 3]].argsort(), left.argsort()), row
        best = [0, 2, 3][int(left.argmin())]
        assert torch.allclose(scores[[1, 4, best]], plain[[1, 4, best]], rtol=1e-4)


def test_a_task_that_holds_more_of_everything_has_no_advantage():
    common, own = torch.eye(D)[0], [torch.eye(D)[1:2], torch.eye(D)[2:3]]
    greedy = torch.nn.functional.normalize(own[1] + common, dim=1)
    z, neutral = 3 * common + own[0], (3 * common).expand(4, D) + 0.1 * activations(1)
    assert ProjectionRouter([own[0], greedy])(z).argmin() == 1
    assert NeutralRouter([own[0], greedy], neutral)(z).argmin() == 0


def test_a_task_that_changes_nothing_is_the_last():
    found = NeutralRouter([orthonormal(4, 1), torch.zeros(0, D)], activations(2))(activations(3))
    assert bool((found[:, 0] < found[:, 1]).all())
    assert bool(found.isfinite().all())


def test_an_activation_of_zeros_gives_finite_scores():
    own = ProjectionRouter([orthonormal(4, 1), orthonormal(4, 2)])
    found = NeutralRouter([orthonormal(4, i) for i in range(1, 4)], activations(2), [0, 1], own)(torch.zeros(2, D))
    assert bool(found.isfinite().all())


def test_prototypes_count_more_beside_subspaces_that_look_random():
    torch.manual_seed(0)
    bases = [torch.linalg.qr(torch.randn(D, 2))[0].mT for _ in range(2)]
    z, owners = torch.randn(20, D), torch.arange(2).repeat(10)
    plain, neutral = (
        PrototypeRouter.fit(z, owners, router)["scales"][1]
        for router in (ProjectionRouter(bases), NeutralRouter(bases, torch.randn(8, D)))
    )
    assert torch.isclose(neutral / plain, torch.tensor(SHARE_ALIKE / SHARE))
