"""The device that stands in for a GPU refuses what a GPU refuses, and computes what the CPU does."""

import threading

import pytest
import torch

from simulated_device import GPU, SimulatedTensor, simulated_gpu


@pytest.fixture(autouse=True)
def gpu():
    with simulated_gpu() as device, torch.no_grad():
        yield device


def test_tensors_say_that_they_are_on_the_gpu(gpu):
    made = [
        torch.ones(2, device=gpu),
        torch.tensor([1.0], device="cuda"),
        torch.arange(3).to(gpu),
        torch.ones(2).cuda(),
    ]
    assert all(isinstance(t, SimulatedTensor) and t.device == GPU for t in made)
    assert made[0].cpu().device.type == "cpu" and made[2].tolist() == [0, 1, 2] and float(made[1]) == 1.0


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, y: x + y,
        lambda x, y: y @ x,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.zeros(2).index_add_(0, torch.arange(2), x),
        lambda x, y: x.gather(0, torch.tensor([1, 0])),
        lambda x, y: y[torch.tensor([1, 0]).to(x.device)],
    ],
)
def test_a_mixture_with_the_cpu_is_refused(gpu, mix):
    with pytest.raises(RuntimeError, match="device"):
        mix(torch.ones(2, device=gpu), torch.ones(2))


def test_numpy_cannot_look_at_it(gpu):
    with pytest.raises(TypeError, match="cpu"):
        torch.ones(2, device=gpu).numpy()


def test_a_number_on_the_cpu_and_indices_on_the_cpu_are_taken(gpu):
    x = torch.arange(6.0, device=gpu).view(2, 3)
    assert (x * torch.tensor(2.0))[torch.tensor([1])].tolist() == [[6.0, 8.0, 10.0]]


def test_indices_and_values_in_place_are_those_of_torch(gpu):
    plain = torch.arange(24.0).view(2, 3, 4)
    given = plain.to(gpu)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    for index in (0, (slice(None), 1), (..., slice(1, 3)), (None, 1), ([1, 0],), (slice(None), torch.tensor([2, 0]))):
        assert torch.equal(given[index].cpu(), plain[index])
    assert torch.equal(given[mask.to(gpu)].cpu(), plain[mask])
    for tensor, here in ((plain, mask), (given, mask.to(gpu))):
        tensor[here] = -1.0
        tensor[:, 0, 1:] += 5
    assert torch.equal(given.cpu(), plain)


def test_threads_that_are_started_inside_have_it_too(gpu):
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(2, device=gpu).sum().item()))
    thread.start()
    thread.join()
    assert found == [2.0]


def test_tied_parameters_stay_tied(gpu):
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    torch.nn.Sequential(first, second).to(gpu)
    assert second.weight is first.weight and first.weight.device == GPU
