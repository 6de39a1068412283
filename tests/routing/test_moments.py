"""What is kept of calibration inputs, and what is drawn from it in their place."""

import torch
from torch.nn.functional import normalize

from massmerge.routing.moments import fit_moments, of_tasks, replay


def seen(count=400, widths=(6, 4)):
    """What two voters see of inputs of three tasks, which differ in their means and lie along few directions."""
    torch.manual_seed(0)
    owners = torch.arange(3).repeat_interleave(count)
    return [torch.randn(3, w)[owners] * 3 + torch.randn(3 * count, 2) @ torch.randn(2, w) * 0.3 for w in widths], owners


def test_replayed_inputs_have_the_mean_of_those_that_were_seen():
    z, owners = seen()
    kept = fit_moments(z, owners, 3)
    for task in range(3):
        for drawn, own in zip(replay(kept, task, [6, 4], 50), z, strict=True):
            assert drawn.shape == (50, own.shape[1])
            assert torch.allclose(drawn.mean(0), normalize(own, dim=1)[owners == task].mean(0), atol=2e-3)


def test_replayed_inputs_scatter_as_those_that_were_seen_do_within_tasks():
    z, owners = seen()
    units = torch.cat([normalize(part, dim=1) for part in z], 1)
    within = torch.cat([units[owners == t] - units[owners == t].mean(0) for t in range(3)])
    kept = fit_moments(z, owners, 3)
    drawn = torch.cat([torch.cat(replay(kept, t, [6, 4], 400), 1) for t in range(3)])
    drawn = torch.cat([part - part.mean(0) for part in drawn.split(400)])
    expected, found = (x.mT @ x / len(x) for x in (within, drawn))
    assert (found - expected).norm() < 0.15 * expected.norm()


def test_a_replay_has_no_more_inputs_than_there_were_and_is_the_same_each_time():
    z, owners = seen(count=5)
    kept = fit_moments(z, owners, 3)
    first, again = (torch.cat(replay(kept, 1, [6, 4], 100), 1) for _ in range(2))
    assert len(first) == 5 and torch.equal(first, again)


def test_moments_of_some_tasks_are_those_they_had():
    z, owners = seen(count=20)
    kept = fit_moments(z, owners, 3)
    some = of_tasks(kept, [2, 0])
    assert torch.equal(some["means"], kept["means"][[2, 0]]) and some["counts"].tolist() == [20, 20]
    assert torch.equal(some["directions"], kept["directions"])
