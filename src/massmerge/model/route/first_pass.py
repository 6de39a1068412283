"""The first pass: activations at the voting sites, and nothing computed behind the last of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from massmerge.model.speed.lengths import length_groups, trimmed
from massmerge.model.speed.parallel import parts_of, run_parts
from massmerge.routing.activation import Activation, joined
from massmerge.routing.sites import Site, routed_part

Token = Literal["cls", "mean", "last", "each"]


@dataclass(frozen=True)
class Voter:
    """A site and what is taken of its activation: the class token, the mean over real tokens, the last, or each of them."""

    site: Site
    token: Token

    @property
    def name(self) -> str:
        """Such as `M3.mean`."""
        return f"{self.site.name}.{self.token}"


class _Stop(Exception):
    """Raised at the last site."""


@dataclass
class _Running:
    """A first pass that is under way: what voters have seen so far, by their places."""

    seen: dict[int, Activation]
    mask: Tensor | None
    batch: int
    stops: bool = True
    """Whether nothing is computed behind the last voter."""


class FirstPass:
    """Runs a model up to the last voting site.

    Args:
        model: hooks are put into it for good; they do nothing in passes that others make.
        voters: what to collect.
    """

    def __init__(self, model: PreTrainedModel, voters: list[Voter]) -> None:
        self.model, self.voters = model, voters
        self.prefix, self._part = routed_part(model)
        self._here = threading.local()  # each thread collects for itself
        names = list(dict.fromkeys(voter.site.name for voter in voters))
        last = max(voters, key=lambda v: v.site.depth).site.name
        for name in names:
            site = next(v.site for v in voters if v.site.name == name)
            module = self._part.get_submodule(site.modules[0].removeprefix(self.prefix))
            module.register_forward_pre_hook(self._hook(name, final=name == last))

    def _hook(self, name: str, *, final: bool) -> Any:
        own = [place for place, voter in enumerate(self.voters) if voter.site.name == name]

        def collect(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            """Keep what the voters of the site take of it, if this thread is in a first pass: never the whole activation."""
            running: _Running | None = getattr(self._here, "running", None)
            if running is None:
                return
            for place in own:
                if place not in running.seen:
                    running.seen[place] = _seen(args[0], self.voters[place].token, running.mask, running.batch)
            if final and running.stops:
                raise _Stop

        return collect

    def __call__(self, inputs: dict[str, Tensor]) -> list[Activation]:
        """What each voter sees, in the order of the voters."""
        first = next(iter(inputs.values()))
        groups = length_groups(inputs)
        if len(groups) > 1:
            found = run_parts(lambda rows: self._run(trimmed(inputs, rows)), groups)
            return [_in_order(list(parts), groups) for parts in zip(*found, strict=True)]

        def run(rows: slice) -> list[Activation]:
            """The activations of some rows."""
            return self._run({name: tensor[rows] for name, tensor in inputs.items()})

        found = run_parts(run, parts_of(first.shape[0], first.device))
        return [joined(list(parts)) for parts in zip(*found, strict=True)]

    @torch.inference_mode()
    def _run(self, inputs: dict[str, Tensor]) -> list[Activation]:
        return self.collect(inputs)

    def collect(self, inputs: dict[str, Tensor]) -> list[Activation]:
        """The same in one part, with gradients if those are on."""
        running = self._here.running = _Running({}, inputs.get("attention_mask"), next(iter(inputs.values())).shape[0])
        try:
            self._part(**inputs)
        except _Stop:
            pass
        finally:
            del self._here.running
        return [running.seen[place] for place in range(len(self.voters))]

    @contextmanager
    def watching(self, inputs: dict[str, Tensor]) -> Iterator[Callable[[], list[Activation]]]:
        """Collect in a pass that this thread makes inside, and that is run to its end; gives what tells what was seen."""
        count = next(iter(inputs.values())).shape[0]
        running = self._here.running = _Running({}, inputs.get("attention_mask"), count, stops=False)
        try:
            yield lambda: [running.seen[place] for place in range(len(self.voters))]
        finally:
            del self._here.running


def _in_order(parts: list[Activation], groups: list[list[int]]) -> Activation:
    """The activations of groups of a batch's rows, in the order of the batch."""
    places = torch.argsort(torch.tensor([row for group in groups for row in group]))
    return joined(parts).of(places)


def _seen(hidden: Tensor, token: Token, mask: Tensor | None, batch: int) -> Activation:
    """What a voter takes of a site's activation."""
    if token != "each":
        return Activation(pool(hidden, token, mask, batch))
    hidden = by_token(hidden, batch)
    if mask is None or mask.shape != hidden.shape[:2]:
        tokens = torch.full((batch,), hidden.shape[1], device=hidden.device)
        return Activation(hidden.flatten(0, 1).float(), tokens)
    return Activation(hidden[mask.bool()].float(), mask.sum(1))


def pool(hidden: Tensor, token: Literal["cls", "mean", "last"], mask: Tensor | None, batch: int) -> Tensor:
    """One vector (batch, width) for each input of an activation (batch, tokens, width)."""
    hidden = by_token(hidden, batch)
    if token == "cls":
        return hidden[:, 0].float()
    if mask is None or mask.shape != hidden.shape[:2]:
        return hidden[:, -1].float() if token == "last" else hidden.float().mean(1)
    if token == "last":
        # Padding may stand on either side, so it is the place of the last 1.
        last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
        return hidden[torch.arange(batch, device=hidden.device), last].float()
    real = mask.float()
    # Not as an einsum, which takes seven times as long: at each site of a large decoder that was a tenth of the first pass.
    return torch.bmm(real[:, None], hidden.float())[:, 0] / real.sum(1, keepdim=True).clamp_min(1)


def by_token(hidden: Tensor, batch: int) -> Tensor:
    """An activation as (batch, tokens, width)."""
    if hidden.ndim == 2:
        return hidden.reshape(batch, -1, hidden.shape[-1])
    # Feature maps are (batch, height, width, channels).
    return hidden.flatten(1, -2) if hidden.ndim > 3 else hidden
