"""The first pass: activations at the voting sites, and nothing computed behind the last of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from massmerge.parallel import parts_of, run_parts
from massmerge.routing.sites import Site, routed_part

Token = Literal["cls", "mean"]


@dataclass(frozen=True)
class Voter:
    """A site and what is taken of its activation: the class token, or the mean over real tokens."""

    site: Site
    token: Token

    @property
    def name(self) -> str:
        """Such as `M3.mean`."""
        return f"{self.site.name}.{self.token}"


class _Stop(Exception):
    """Raised at the last site."""


class FirstPass:
    """Runs a model up to the last voting site.

    Args:
        model: hooks are put into it for good; they do nothing in passes that others make.
        voters: what to collect.
    """

    def __init__(self, model: PreTrainedModel, voters: list[Voter]) -> None:
        self.voters = voters
        self.prefix, self._part = routed_part(model)
        self._here = threading.local()  # each thread collects for itself
        names = list(dict.fromkeys(voter.site.name for voter in voters))
        last = max(voters, key=lambda v: v.site.depth).site.name
        for name in names:
            site = next(v.site for v in voters if v.site.name == name)
            module = self._part.get_submodule(site.modules[0].removeprefix(self.prefix))
            module.register_forward_pre_hook(self._hook(name, final=name == last))

    def _hook(self, name: str, *, final: bool) -> Any:
        def collect(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            found: dict[str, Tensor] | None = getattr(self._here, "found", None)
            if found is None:
                return
            found.setdefault(name, args[0])
            if final:
                raise _Stop

        return collect

    def __call__(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        """Activations (batch, width), one for each voter in order."""
        first = next(iter(inputs.values()))

        def run(rows: slice) -> list[Tensor]:
            return self._run({name: tensor[rows] for name, tensor in inputs.items()})

        found = run_parts(run, parts_of(first.shape[0], first.device))
        return [torch.cat(parts) for parts in zip(*found, strict=True)] if len(found) > 1 else found[0]

    @torch.inference_mode()
    def _run(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        found: dict[str, Tensor] = {}
        self._here.found = found
        try:
            self._part(**inputs)
        except _Stop:
            pass
        finally:
            del self._here.found
        mask = inputs.get("attention_mask")
        batch = next(iter(inputs.values())).shape[0]
        return [pool(found[v.site.name], v.token, mask, batch).cpu() for v in self.voters]


def pool(hidden: Tensor, token: Token, mask: Tensor | None, batch: int) -> Tensor:
    """One vector (batch, width) for each input of an activation (batch, tokens, width)."""
    if hidden.ndim == 2:
        hidden = hidden.reshape(batch, -1, hidden.shape[-1])
    if hidden.ndim > 3:  # feature maps (batch, height, width, channels)
        hidden = hidden.flatten(1, -2)
    if token == "cls":
        return hidden[:, 0].float()
    if mask is None or mask.shape != hidden.shape[:2]:
        return hidden.float().mean(1)
    real = mask.to(hidden.dtype)
    return torch.einsum("btd,bt->bd", hidden, real).float() / real.sum(1, keepdim=True).clamp_min(1)
