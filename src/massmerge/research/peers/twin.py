"""Twin-Merging: a shared expert, each task's own part on top of it, and a trained router that mixes those for each input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from massmerge.checkpoints.skeleton import to_matrix
from massmerge.errors import InputError
from massmerge.linalg.factors import Factors, truncated_svd
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.model.heads.linear import features
from massmerge.model.second_pass import Change, SecondPass, SetChanges
from massmerge.model.second_pass.segments import Segment, Segments
from massmerge.research.peers.peer import Inputs, Peer, refuse_missing_inputs
from massmerge.research.peers.task_deltas import add_deltas

_DROPOUT = 0.5  # the authors'


class Mixture(SetChanges):
    """The tasks' own parts, each times its weight; whole tensors too, which in a bundle's sets are averaged."""

    def _make(self, tensor: str) -> Change:
        assert self.weights is not None
        parts = [(w, own) for t, w in zip(self.tasks, self.weights, strict=True)
                 if (own := self._whole(t, tensor)) is not None]  # fmt: skip
        base = self._base(tensor)
        if not parts or base is None:
            return super()._make(tensor)
        return Change(value=base + torch.stack([weight * own for weight, own in parts]).sum(0))


class Twin(Peer):
    """Two passes: the shared expert's output says how the tasks' own parts are mixed, the second pass answers.

    Args:
        prepared: a recipe's sources.
        scale: of task arithmetic, which is the shared expert.
        kept: share of the rank that is kept of a task's own part of a matrix.
        options: what else the peer was made with.
    """

    site = "router on the shared expert's output"

    def __init__(self, prepared: OpenedRecipe, *, scale: float, kept: float, **options: Any) -> None:
        if not 0 < kept <= 1:
            raise InputError(f"twin: kept = {kept}; it is a share of the rank, above 0 and at most 1.")
        if prepared.base.writes:
            raise InputError(
                "twin: its router reads the features that heads read, and models that write have no heads. It is for models "
                "that answer with labels."
            )
        super().__init__(prepared, "twin", {"scale": scale, "kept": kept, **options})
        names = self.deltas.names()
        self._factors: dict[tuple[int, str], Factors] = {}
        self._whole: dict[tuple[int, str], Tensor] = {}
        for name in names:
            self._split(name, scale, kept)
        add_deltas(self.base, self.deltas, names, scale)
        self._second = SecondPass(self.base, names, self.deltas.slots, self.core.observed())
        self._state = dict(self.base.state_dict())
        self.router: nn.Module = nn.Identity()
        """From features to logits over the tasks; `twin` trains it."""

    def _split(self, name: str, scale: float, kept: float) -> None:
        """Each expert's difference to the shared expert: a matrix's is cut to a part of its rank, others are kept whole."""
        slot, shared = self.deltas.slots[name], scale * self.deltas.total(name)
        for task in range(len(self.tasks)):
            own = self.deltas.delta(task, name)
            difference = -shared if own is None else own - shared
            if not bool(difference.any()):
                continue
            if slot.matrix is None:
                self._whole[task, name] = difference
            else:
                rank = max(1, int(kept * min(slot.matrix)))
                self._factors[task, name] = truncated_svd(to_matrix(difference, slot.kind), rank)

    @torch.inference_mode()
    def features(self, batch: dict[str, Tensor]) -> Tensor:
        """What the router reads (batch, width): the mean over real tokens of the shared expert's last hidden state."""
        return features(self.base(**self.core.call(batch)), batch, "mean")

    @torch.inference_mode()
    def forward(self, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
        """The backbone's output for a batch, and the router's weights (batch, T)."""
        weights = self.router(self.features(batch)).softmax(1)
        parts = [Segment(self._mixture(row), i, i + 1) for i, row in enumerate(weights.tolist())]
        return self._second(self.core.call(batch), Segments(tuple(parts), len(parts))), weights

    def _mixture(self, weights: list[float]) -> Mixture:
        used = tuple(task for task, weight in enumerate(weights) if weight > 0)
        return Mixture(
            used,
            lambda task, name: self._factors.get((task, name)),
            lambda task, name: self._whole.get((task, name)),
            self._state.get,
            "mixture",
            [weights[task] for task in used],
        )

    def own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tasks' own parts, and the router."""
        for (task, name), factors in self._factors.items():
            yield from ((f"{self.tasks[task]}.{name}.{n}", t) for n, t in zip("usv", factors, strict=True))
        yield from ((f"{self.tasks[task]}.{name}", own) for (task, name), own in self._whole.items())
        yield from ((f"router.{name}", tensor) for name, tensor in self.router.state_dict().items())


def fit_router(
    given: Tensor, owners: Tensor, tasks: int, *, epochs: int, batch_size: int, rate: float, seed: int
) -> nn.Module:
    """Train the authors' network, three layers that are twice as wide inside; the last epoch's is kept.

    Args:
        given: features (n, width).
        owners: the tasks (n,) that they are of.
        tasks: how many tasks there are.
        epochs: passes over the features.
        batch_size: features in a step.
        rate: of learning.
        seed: of first weights, dropout and order.
    """
    width = given.shape[1]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for size in (width, 2 * width):
            layers += [nn.Linear(size, 2 * width), nn.BatchNorm1d(2 * width), nn.LeakyReLU(), nn.Dropout(_DROPOUT)]
        router = nn.Sequential(*layers, nn.Linear(2 * width, tasks))
        optimizer = torch.optim.Adam(router.parameters(), lr=rate)
        for _ in range(epochs):
            for chosen in torch.split(torch.randperm(len(given)), batch_size):
                if len(chosen) == 1:  # one feature has no spread to be normalised by
                    continue
                optimizer.zero_grad()
                cross_entropy(router(given[chosen]), owners[chosen]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return router.eval().requires_grad_(False)


def twin(
    prepared: OpenedRecipe,
    inputs: Inputs | None = None,
    *,
    scale: float = 0.3,
    kept: float = 0.1,
    epochs: int = 50,
    batch_size: int = 64,
    rate: float = 5e-4,
    seed: int = 0,
) -> Peer:
    """Twin-Merging, its router trained on inputs of each task.

    Args:
        prepared: a recipe's sources.
        inputs: inputs of each task; the task is all the label that they have.
        scale: of task arithmetic, which is the shared expert.
        kept: share of the rank that is kept of a task's own part of a matrix.
        epochs: of the router's training.
        batch_size: inputs in a step of it.
        rate: of learning.
        seed: of the router.

    Raises:
        InputError: a task has no inputs.
    """
    peer = Twin(prepared, scale=scale, kept=kept, epochs=epochs, batch_size=batch_size, rate=rate, seed=seed)
    chosen = refuse_missing_inputs(inputs, peer.tasks)
    found = [torch.cat([peer.features(batch) for batch in peer.core.batches(chosen[task], 32)]) for task in peer.tasks]
    owners = torch.repeat_interleave(torch.arange(len(found)), torch.tensor([len(part) for part in found]))
    peer.router = fit_router(
        torch.cat(found).cpu(), owners, len(found), epochs=epochs, batch_size=batch_size, rate=rate, seed=seed
    ).to(peer.base.device)
    return peer
