"""A router that is trained: a two-layer network on the activations of a support set."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from massmerge.routing.per_voter import VoterRouter
from massmerge.routing.projection import ProjectionRouter

_HIDDEN, _DROPOUT = 1024, 0.5  # the paper's


def _network(width: int, tasks: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Dropout(_DROPOUT), nn.Linear(_HIDDEN, tasks))


def fit_mlp(activations: Tensor, owners: Tensor, tasks: int, *, steps: int = 300, seed: int = 0) -> dict[str, Tensor]:
    """Train on normalised activations (n, d); returns the network's tensors. The same inputs give the same network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _network(activations.shape[1], tasks)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        units = normalize(activations, dim=1)
        # What all tasks share is most of an activation, and drowns what tells them apart.
        centre, spread = units.mean(0), (units - units.mean(0)).std(correction=0).clamp_min(1e-6)
        units = (units - centre) / spread
        for _ in range(steps):
            chosen = torch.randint(len(units), (min(len(units), 128),))
            loss = cross_entropy(network(units[chosen]), owners[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    tensors = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    # The first layer takes the centring in, so that the network reads normalised activations as they are.
    tensors["0.weight"] /= spread
    tensors["0.bias"] -= tensors["0.weight"] @ centre
    return tensors


class MlpRouter(VoterRouter):
    """Scores of one voter: the negative logits of the trained network; less is better."""

    @classmethod
    def fit(cls, z: Tensor, owners: Tensor, subspaces: ProjectionRouter) -> dict[str, Tensor]:
        """The network's tensors."""
        return {f"net.{name}": tensor for name, tensor in fit_mlp(z, owners, len(subspaces.ranks)).items()}

    @classmethod
    def load(cls, tensors: dict[str, Tensor], subspaces: ProjectionRouter) -> MlpRouter:
        """The network."""
        return cls({n.removeprefix("net."): t for n, t in tensors.items() if n.startswith("net.")})

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._network = _network(tensors["0.weight"].shape[1], tensors["3.weight"].shape[0])
        self._network.load_state_dict(tensors)
        self._network.eval()

    @torch.inference_mode()
    def __call__(self, z: Tensor) -> Tensor:
        """Negative logits (batch, T) of activations (batch, d)."""
        return -self._network(normalize(z, dim=1))
