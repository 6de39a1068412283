"""WeMoE: each block's MLP is merged for each input, by gates that were adapted on unlabelled inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from massmerge.checkpoints.skeleton import to_matrix
from massmerge.errors import InputError
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.model.route.first_pass import pool
from massmerge.model.trees import replace_module
from massmerge.research.peers.entropy import minimise_entropy
from massmerge.research.peers.peer import Inputs, Peer, VotingPeer, refuse_missing_inputs
from massmerge.research.peers.task_deltas import add_deltas
from massmerge.research.peers.votes import under_way
from massmerge.routing.sites import Site, find_decoder_sites, find_sites

_HELD = 1 << 26  # numbers of merged weights that are made at once


class Gate(nn.Module):
    """A small network on what an MLP reads; its output, averaged over real tokens, is how much of each delta is added."""

    def __init__(self, width: int, tasks: int, start: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, tasks)
        for layer in (self.first, self.second):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
        nn.init.constant_(self.second.bias, start)

    def forward(self, x: Tensor) -> Tensor:
        """Gates (batch, T) of activations (batch, tokens, width); one row where the pass shares a gate."""
        current = under_way()
        given = self.second(F.relu(self.first(x)))
        mean = pool(given, "mean", current.mask, current.batch)
        return mean.mean(0, keepdim=True) if current.shared else mean


class GatedLinear(nn.Module):
    """A linear layer of an MLP whose weight is the base's plus the deltas times the block's gates.

    Args:
        layer: the base's layer, Conv1D included.
        weight: its weight as a matrix (m, n).
        deltas: of the weight, (T, m, n).
        biases: of the bias, (T, m).
        block: name of the MLP; its first layer computes the gates, the others use them.
        gate: of that MLP.
    """

    def __init__(
        self, layer: nn.Module, weight: Tensor, deltas: Tensor, biases: Tensor, block: str, gate: Gate
    ) -> None:
        super().__init__()
        self.layer, self._block = layer, block
        self._matrix, self.deltas, self.biases = weight, deltas, biases
        self._gate = [gate]  # in a list: it is the peer's, not a part of every layer

    @property
    def weight(self) -> Tensor:
        """The base's weight; some models look at its dtype."""
        return self.layer.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, each input with its own weight."""
        current = under_way()
        tokens = x.reshape(current.batch, -1, x.shape[-1])
        if self._block not in current.gates:
            gates = current.gates[self._block] = self._gate[0](tokens)
            if not current.shared:
                current.votes.append(gates.argmax(1))
        gates = current.gates[self._block]
        if current.shared:
            out = self._merged(tokens, gates)
        else:
            size = max(1, _HELD // self._matrix.numel())
            parts = [
                self._merged(t, g) for t, g in zip(torch.split(tokens, size), torch.split(gates, size), strict=True)
            ]
            out = torch.cat(parts)
        return out.view(*x.shape[:-1], -1)

    def _merged(self, x: Tensor, gates: Tensor) -> Tensor:
        """Outputs (batch, tokens, m) of inputs with a gate each, or with one for all."""
        weights = (self._matrix.flatten() + gates @ self.deltas.flatten(1)).view(-1, *self._matrix.shape)
        biases = gates @ self.biases
        if self.layer.bias is not None:
            biases = biases + self.layer.bias  # type: ignore[operator]
        if len(gates) == 1:
            return F.linear(x, weights[0], biases[0])
        return torch.baddbmm(biases[:, None], x, weights.mT)


class WeMoE(VotingPeer):
    """Everything but the MLPs is task arithmetic; the MLPs are merged for each input by their gates."""

    def __init__(self, prepared: OpenedRecipe, *, scale: float, seed: int, **options: Any) -> None:
        super().__init__(prepared, "wemoe", {"scale": scale, "seed": seed, **options})
        blocks = self._mlps()
        if not blocks:
            raise InputError("wemoe: no task changes an MLP, so there is nothing to gate.")
        routed = {f"{path}.{own}" for sites in blocks.values() for s in sites for path in s.modules
                  for own in ("weight", "bias")}  # fmt: skip
        add_deltas(self.base, self.deltas, [name for name in self.deltas.names() if name not in routed], scale)
        self.gates: dict[str, Gate] = {}
        self._layers: dict[str, GatedLinear] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for block, sites in blocks.items():
                self.gates[block] = (
                    Gate(sites[0].width, len(self.tasks), scale).requires_grad_(False).to(self.base.device)
                )
        for block, sites in blocks.items():
            for path in (path for site in sites for path in site.modules):
                self._layers[path] = self._layer(path, block)
                replace_module(self.tree, path, self._layers[path])

    def _mlps(self) -> dict[str, list[Site]]:
        """The sites of each block's MLP that a task changes: what it reads, and what its output layer reads."""
        blocks: dict[str, list[Site]] = {}
        touched = set(self.deltas.names())
        for part, sites in (("", find_sites(self.base)), ("decoder.", find_decoder_sites(self.base))):
            for site in sites:
                if re.fullmatch(r"[MD]\d+", site.name):
                    blocks.setdefault(part + site.name[1:], []).append(site)
        return {b: sites for b, sites in blocks.items() if any(touched.intersection(s.tensors) for s in sites)}

    def _layer(self, path: str, block: str) -> GatedLinear:
        module, slot, tasks = self.base.get_submodule(path), self.deltas.slots[f"{path}.weight"], range(len(self.tasks))
        weight = to_matrix(module.weight, slot.kind)
        deltas, biases = weight.new_zeros(len(tasks), *weight.shape), weight.new_zeros(len(tasks), weight.shape[0])
        for task in tasks:
            change = self.deltas.delta(task, f"{path}.weight")
            if change is not None:
                deltas[task] = to_matrix(change, slot.kind)
            change = self.deltas.delta(task, f"{path}.bias") if f"{path}.bias" in self.deltas.slots else None
            if change is not None:
                biases[task] = change
        return GatedLinear(module, weight, deltas, biases, block, self.gates[block])

    def own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The deltas of the MLPs that are not zero, and the gates."""
        for path, layer in self._layers.items():
            for own, stacked in (("weight", layer.deltas), ("bias", layer.biases)):
                found = zip(self.tasks, stacked, strict=True)
                yield from ((f"{task}.{path}.{own}", delta) for task, delta in found if bool(delta.any()))
        for block, gate in self.gates.items():
            yield from ((f"gate.{block}.{name}", tensor) for name, tensor in gate.state_dict().items())


def wemoe(
    prepared: OpenedRecipe,
    inputs: Inputs | None = None,
    *,
    scale: float = 0.3,
    steps: int = 100,
    batch_size: int = 8,
    rate: float = 1e-3,
    seed: int = 0,
    progress: Callable[[Iterable[int], str, int], Iterable[int]] = lambda items, what, total: items,
) -> Peer:
    """WeMoE, its gates adapted by entropy minimisation.

    Args:
        prepared: a recipe's sources.
        inputs: unlabelled inputs of each task.
        scale: of task arithmetic outside the MLPs, and what all gates are before they are adapted.
        steps: of adaptation; 0 leaves the gates as they begin.
        batch_size: inputs of each task in a step.
        rate: of learning.
        seed: of the gates and of the draw of inputs.
        progress: wraps the steps.

    Raises:
        InputError: a task has no inputs, or no task changes an MLP.
    """
    peer = WeMoE(prepared, scale=scale, seed=seed, steps=steps, batch_size=batch_size, rate=rate)
    if steps:
        chosen = refuse_missing_inputs(inputs, peer.tasks)
        gates = nn.ModuleList(peer.gates.values()).requires_grad_(True)
        minimise_entropy(
            peer.core, peer.tree, list(gates.parameters()), chosen,
            steps=progress(range(steps), "adapting gates", steps), batch_size=batch_size, rate=rate, seed=seed,
        )  # fmt: skip
        gates.requires_grad_(False)
    return peer
