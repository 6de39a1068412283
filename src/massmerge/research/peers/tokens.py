"""Linear layers that choose experts for each token by how much of it lies in the first singular vectors of their deltas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from massmerge.errors import InputError
from massmerge.linalg.factors import Factors
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.model.trees import replace_module
from massmerge.research.peers.peer import VotingPeer
from massmerge.research.peers.task_deltas import add_deltas
from massmerge.research.peers.votes import under_way


class TokenRouted(nn.Module):
    """A linear layer (or GPT-2's Conv1D) plus, for each token, the low-rank updates of the experts that it chooses.

    A token's score for an expert is the length of its projection on the expert's gate; the best `top_k` are mixed by the
    softmax of their scores.

    Args:
        layer: the base's layer.
        experts: factors of each task's delta, `v` with at least as many rows as the gate; none for a task without one.
        biases: each task's change (m,) of the bias.
        gate: how many right singular vectors a gate has.
        rank: how many triplets an update has.
        top_k: how many experts a token is sent to.
        temperature: that scores are divided by.
        votes: whether the layer's rows are tokens of inputs, so that it has a vote.
    """

    def __init__(
        self,
        layer: nn.Module,
        experts: list[Factors | None],
        biases: list[Tensor | None],
        *,
        gate: int,
        rank: int,
        top_k: int = 1,
        temperature: float = 1.0,
        votes: bool = True,
    ) -> None:
        super().__init__()
        self.layer, self._votes, self._rank = layer, votes, rank
        self.experts, self.biases = experts, biases
        self._top_k, self._temperature = min(top_k, len(experts)), temperature
        first = next(f.v for f in experts if f is not None)
        gates = first.new_zeros(len(experts), gate, first.shape[1])
        for task, factors in enumerate(experts):
            if factors is not None:
                rows = factors.v[:gate]
                gates[task, : len(rows)] = rows
        self._gates = gates
        self._absent = torch.tensor([factors is None for factors in experts], device=first.device)

    @property
    def weight(self) -> Tensor:
        """The base's weight; some models look at its dtype."""
        return self.layer.weight  # type: ignore[return-value]

    def choose(self, rows: Tensor) -> Tensor:
        """How much (rows, T) of each expert's update tokens (rows, n) get; 0 of those that they are not sent to."""
        inside = rows @ self._gates.flatten(0, 1).mT
        scores = inside.view(len(rows), *self._gates.shape[:2]).norm(dim=-1) / self._temperature
        # An expert that leaves this layer as it is has nothing to be chosen for.
        best = scores.masked_fill(self._absent, -torch.inf).topk(self._top_k, dim=1)
        return torch.zeros_like(scores).scatter_(1, best.indices, best.values.softmax(1))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, each token with its own update."""
        rows = x.reshape(-1, x.shape[-1])
        weights = self.choose(rows)
        out: Tensor = self.layer(x)
        flat = out.view(-1, out.shape[-1])
        for task, factors in enumerate(self.experts):
            index = weights[:, task].nonzero().flatten()
            if factors is not None and len(index):
                flat.index_add_(0, index, self._update(rows[index], task, factors) * weights[index, task, None])
        if self._votes:
            under_way().vote(weights.argmax(1), len(self.experts))
        return out

    def _update(self, rows: Tensor, task: int, factors: Factors) -> Tensor:
        k, bias = self._rank, self.biases[task]
        update = (rows @ factors.v[:k].mT * factors.s[:k]) @ factors.u[:, :k].mT
        return update if bias is None else update + bias


class TokenRoutedPeer(VotingPeer):
    """Every linear layer that a task changes chooses experts for each token; all else is the base's.

    Args:
        prepared: a recipe's sources.
        name: of the method.
        gate: as in `TokenRouted`.
        rank: as in `TokenRouted`.
        average_others: whether tensors that are not of linear layers are the mean over the experts.
        routing: further options of `TokenRouted`.
    """

    def __init__(
        self, prepared: OpenedRecipe, name: str, *, gate: int, rank: int, average_others: bool = False, **routing: Any
    ) -> None:
        wrong = [f"{n} = {v}" for n, v in {"gate": gate, "rank": rank, **routing}.items() if v <= 0]
        if wrong:
            raise InputError(f"{name}: {', '.join(wrong)}; it must be above 0.")
        options: Mapping[str, Any] = {"gate": gate, "rank": rank, "average_others": average_others, **routing}
        super().__init__(prepared, name, options)
        self._layers: dict[str, TokenRouted] = {}
        canonical, voters = prepared.base.skeleton.canonical, self.core.observed().batched
        for path, module in self.base.named_modules():
            weight, bias = (canonical.get(f"{path}.{own}", "") for own in ("weight", "bias"))
            if not isinstance(module, nn.Linear | Conv1D) or not weight:
                continue
            experts = [self._factors(task, weight, max(gate, rank), rank) for task in range(len(self.tasks))]
            if all(factors is None for factors in experts):
                continue
            biases = [self.deltas.delta(task, bias) if bias else None for task in range(len(self.tasks))]
            layer = TokenRouted(module, experts, biases, gate=gate, rank=rank, votes=path in voters, **routing)
            self._layers[path] = layer
            replace_module(self.tree, path, layer)
        if not any(path in voters for path in self._layers):
            raise InputError(f"{name}: no task changes a linear layer, so there is nothing to route by.")
        if average_others:
            routed = {canonical[f"{path}.{own}"] for path in self._layers for own in ("weight", "bias")
                      if f"{path}.{own}" in canonical}  # fmt: skip
            others = [tensor for tensor in self.deltas.names() if tensor not in routed]
            add_deltas(self.base, self.deltas, others, 1 / len(self.tasks))

    def _factors(self, task: int, name: str, count: int, rank: int) -> Factors | None:
        """A task's factors, with as many right vectors as gate or update need and no more left ones than the update."""
        found = self.deltas.factors(task, name, count)
        return None if found is None else Factors(found.u[:, :rank].contiguous(), found.s[:rank].clone(), found.v)

    def own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The experts' factors and changes of biases; a gate is the first rows of `v`."""
        for path, layer in self._layers.items():
            for task, factors, bias in zip(self.tasks, layer.experts, layer.biases, strict=True):
                if factors is not None:
                    yield from ((f"{task}.{path}.{n}", t) for n, t in zip("usv", factors, strict=True))
                    if bias is not None:
                        yield f"{task}.{path}.bias", bias
