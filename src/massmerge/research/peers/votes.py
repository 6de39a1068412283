"""How the layers of a routed peer say which task an input is of, while a pass is under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import one_hot


@dataclass
class Pass:
    """A pass that is under way: what layers need to know of its inputs, and the votes that they cast."""

    batch: int
    mask: Tensor | None = None
    """(batch, tokens), 0 at padding; none where all tokens are real."""
    shared: bool = False
    """Whether all inputs of the batch have one gate, as in training."""
    votes: list[Tensor] = field(default_factory=list)
    """For each layer that votes the task (batch,) that it is for."""
    gates: dict[str, Tensor] = field(default_factory=dict)
    """Gates (batch or 1, T) by block, for layers after the one that computes them."""

    def vote(self, best: Tensor, tasks: int) -> None:
        """Cast a layer's vote for each input: the task that most of its real tokens chose, the first of equals.

        Args:
            best: the task of each token, those of an input next to each other.
            tasks: how many tasks there are.
        """
        chosen = one_hot(best.view(self.batch, -1), tasks)
        if self.mask is not None and self.mask.shape == chosen.shape[:2]:  # a pooled layer sees no padding
            chosen = chosen * self.mask[..., None]
        self.votes.append(chosen.sum(1).argmax(1))


_UNDER_WAY: ContextVar[Pass] = ContextVar("pass under way")


def under_way() -> Pass:
    """The pass that is under way in this thread."""
    return _UNDER_WAY.get()


@contextmanager
def running(current: Pass) -> Iterator[Pass]:
    """Run a pass; other threads have their own."""
    token = _UNDER_WAY.set(current)
    try:
        yield current
    finally:
        _UNDER_WAY.reset(token)


def shares(votes: Sequence[Tensor], tasks: int) -> Tensor:
    """Which share (batch, T) of the layers is for each task."""
    return one_hot(torch.stack(list(votes), 1), tasks).float().mean(1)
