"""Trains a small adapter of the first pass to name the task: the router for those who have all training inputs."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from massmerge.errors import InputError
from massmerge.model.core import Core
from massmerge.model.inputs import Row
from massmerge.model.model import Model
from massmerge.model.route.first_pass import FirstPass, Voter
from massmerge.model.trees import replace_module, shared_copy
from massmerge.routing.tuned import ADAPTER, task_logits

_SCALE = 2.0  # of what the factors add while they are trained, as is usual: they move faster with it
_ASKED = 100
_WINDOW = 20  # batches whose inputs are sorted by length together, so that little is padded
Step = Callable[[str], None]


@dataclass(frozen=True)
class TuneOptions:
    """How the adapter is trained; chosen on validation rows of the text suite, see docs/research/routing.md.

    Attributes:
        rank: of the factors of each linear layer.
        rate: the highest learning rate; it rises over the first twentieth of the steps, then falls as a cosine.
        batch: inputs of a step.
        inputs: how many are seen in all, some of them again and again if there are fewer.
        epochs: how often one is seen at most.
        tokens: of a text that are read.
        seed: of factors and order.
    """

    rank: int = 8
    rate: float = 1e-3
    batch: int = 64
    inputs: int = 30_000
    epochs: int = 20
    tokens: int = 128
    seed: int = 0

    def steps(self, count: int) -> int:
        """How many steps are made with so many inputs."""
        return max(1, math.ceil(max(count, min(self.inputs, self.epochs * count)) / self.batch))


class _Adapted(nn.Module):
    """A linear layer with factors beside it, which alone are trained."""

    def __init__(self, layer: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        width, rank = layer.in_features, min(rank, layer.in_features, layer.out_features)
        self.down = nn.Parameter((torch.randn(rank, width, generator=generator) / math.sqrt(width)).to(self.weight))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank).to(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return linear(x, self.weight, self.bias) + _SCALE * linear(linear(x, self.down), self.up)


class Tuning:
    """A first pass with an adapter, and the linear layer that reads it.

    Args:
        model: whose base is adapted; the base itself stays as it is.
        options: how.

    Raises:
        InputError: the base has no linear layer that could be adapted.
    """

    def __init__(self, model: Model, options: TuneOptions) -> None:
        self.core, self.options, tasks = model.core, options, len(model.tasks)
        self.voters = last_voters(model.stages.voters)
        tree = shared_copy(self.core.base)
        tree.requires_grad_(False)
        generator = torch.Generator().manual_seed(options.seed)
        self._layers: dict[str, _Adapted] = {}
        for path, layer in list(tree.named_modules()):
            if isinstance(layer, nn.Linear):
                self._layers[path] = _Adapted(layer, options.rank, generator)
                replace_module(tree, path, self._layers[path])
        if not self._layers:
            raise InputError(f"a {type(tree).__name__} has no linear layers to adapt: use another kind of router.")
        self.first_pass = FirstPass(tree, self.voters)
        place = self.core.base.device
        widths = [voter.site.width for voter in self.voters]
        self._weights = [nn.Parameter(torch.zeros(tasks, width, device=place)) for width in widths]
        self._bias = nn.Parameter(torch.zeros(tasks, device=place))

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits of the tasks (inputs, T)."""
        return task_logits([one.pooled() for one in self.first_pass.collect(batch)], self._weights, self._bias)

    def train(self, rows: Sequence[Any], owners: Sequence[int], step: Step) -> None:
        """Train on inputs of known task; every task counts as much as the root of its number of inputs."""
        factors = [p for layer in self._layers.values() for p in (layer.down, layer.up)]
        rate = self.options.rate
        groups = [{"params": factors, "lr": rate}, {"params": [*self._weights, self._bias], "lr": 3 * rate}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
        total = self.options.steps(len(rows))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: _rate_at(at, total))
        counts = torch.bincount(torch.tensor(owners), minlength=len(self._bias)).clamp_min(1)
        weights = (counts.float().rsqrt() / counts.float().rsqrt().mean()).to(self._bias.device)
        began = time.monotonic()
        for at, places in enumerate(_order([_length(row) for row in rows], total, self.options), 1):
            with torch.enable_grad():
                found = self.logits(self.core.batch([self.core.reader.row(rows[i]) for i in places]))
                truth = torch.tensor([owners[i] for i in places], device=found.device)
                loss = cross_entropy(found, truth, weights)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(factors, 1.0)
            optimizer.step()
            schedule.step()
            left = (time.monotonic() - began) / at * (total - at)
            step(f"tuned: step {at} of {total}, {_minutes(left)} left")

    def kept(self) -> dict[str, Tensor]:
        """What a bundle keeps: factors of the layers that the first pass runs, and the linear layer."""
        found = {f"{v.name}.weight": w.detach().cpu() for v, w in zip(self.voters, self._weights, strict=True)}
        found["bias"] = self._bias.detach().cpu()
        for path, layer in self._layers.items():
            if bool(layer.up.detach().any()):  # what is behind the last voter never gets a gradient
                found[f"{ADAPTER}{path}.weight.down"] = layer.down.detach().cpu().half()
                found[f"{ADAPTER}{path}.weight.up"] = (_SCALE * layer.up.detach().cpu()).half()
        return found


def read_rows(core: Core, inputs: Mapping[str, Sequence[Any]], tokens: int) -> tuple[list[Any], list[int]]:
    """Inputs of the tasks and the task of each; texts as tokens, long ones cut. Images are read when they are needed.

    Raises:
        InputError: an input cannot be read.
    """
    rows: list[Any] = []
    owners: list[int] = []
    for owner, (task, items) in enumerate(inputs.items()):
        for item in items:
            rows.append(item if core.reader.image else _cut_row(core, task, item, tokens))
            owners.append(owner)
    return rows, owners


def _cut_row(core: Core, task: str, item: Any, tokens: int) -> Row:
    try:
        return {name: tensor[:tokens] for name, tensor in core.reader.row(item).items()}
    except InputError as error:
        raise InputError(f"inputs of {task}: {error}") from None


def leave_out(inputs: Mapping[str, Sequence[Any]]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Inputs to train on, and of each task a tenth, at most 100, to ask about afterwards; none if a task has too few."""
    counts = {task: min(_ASKED, len(items) // 10) for task, items in inputs.items()}
    if not all(counts.values()):
        return {task: list(items) for task, items in inputs.items()}, {task: [] for task in inputs}
    # Evenly spread, for files may be sorted.
    asked = {task: set(range(0, len(items), len(items) // counts[task])) for task, items in inputs.items()}
    parts = ({t: [x for i, x in enumerate(items) if (i in asked[t]) == left] for t, items in inputs.items()}
             for left in (False, True))  # fmt: skip
    trained, left_out = parts
    return trained, left_out


def last_voters(voters: Sequence[Voter]) -> list[Voter]:
    """The voters of the last site: the tokens there have been through all that the first pass runs."""
    last = max(voters, key=lambda voter: voter.site.depth).site.name
    return [voter for voter in voters if voter.site.name == last]


def _length(row: Any) -> int:
    return len(row["input_ids"]) if isinstance(row, Mapping) and "input_ids" in row else 0


def _rate_at(step: int, total: int) -> float:
    """The learning rate of a step, as a share of the highest."""
    rising = min(1.0, (step + 1) / max(1.0, 0.05 * total))
    return rising * 0.5 * (1 + math.cos(math.pi * min(step, total) / total))


def _order(lengths: Sequence[int], steps: int, options: TuneOptions) -> Iterator[list[int]]:
    """Places of the inputs of each step: in random order, inputs of similar length together."""
    draw, made = random.Random(options.seed), 0
    while True:
        order = list(range(len(lengths)))
        draw.shuffle(order)
        window = options.batch * _WINDOW
        batches = []
        for at in range(0, len(order), window):
            near = sorted(order[at : at + window], key=lengths.__getitem__)
            batches += [near[i : i + options.batch] for i in range(0, len(near), options.batch)]
        draw.shuffle(batches)
        for batch in batches:
            if made == steps:
                return
            made += 1
            yield batch


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
