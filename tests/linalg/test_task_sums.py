"""Sums over each task's own vectors."""

import pytest
import torch

from massmerge.linalg.task_sums import task_sums


@pytest.mark.parametrize("count", [4, 0])
@pytest.mark.parametrize("ranks", [[3, 3, 3], [2, 0, 2], [1, 4, 0, 2], [0, 0], [5]])
def test_each_task_has_the_sum_of_its_own_values(ranks, count):
    values = torch.randn(count, sum(ranks), generator=torch.Generator().manual_seed(0))
    expected = torch.stack([part.sum(1) for part in torch.split(values, ranks, 1)], 1)
    assert torch.allclose(task_sums(values, ranks), expected, atol=1e-6)


def test_values_may_have_gradients():
    values = torch.randn(2, 5, requires_grad=True)
    task_sums(values, [2, 3]).sum().backward()
    assert torch.equal(values.grad, torch.ones(2, 5))
