"""What a voter sees of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize


@dataclass(frozen=True)
class Activation:
    """Vectors of a batch at a site: one for each input, or one for each of its tokens.

    Attributes:
        rows: vectors (n, width), those of an input next to each other.
        tokens: how many rows each input has (batch,); None where each has one.
    """

    rows: Tensor
    tokens: Tensor | None = None

    @property
    def vectors(self) -> Tensor:
        """The rows as a router projects them: tokens at length 1, so that none of an input's speaks louder than another."""
        return self.rows if self.tokens is None else normalize(self.rows, dim=1)

    def averaged(self, values: Tensor) -> Tensor:
        """Means (batch, …) over each input's tokens of values (n, …) that belong to the rows."""
        if self.tokens is None:
            return values
        owners = torch.repeat_interleave(self.tokens)
        sums = values.new_zeros(len(self.tokens), *values.shape[1:]).index_add_(0, owners, values)
        return sums / self.tokens.clamp_min(1).reshape(-1, *(1,) * (values.ndim - 1))

    def pooled(self) -> Tensor:
        """One vector (batch, width) for each input."""
        return self.averaged(self.rows)

    def of(self, inputs: Tensor) -> Activation:
        """The vectors of some inputs, in that order."""
        if self.tokens is None:
            return Activation(self.rows[inputs])
        own = torch.split(self.rows, self.tokens.tolist())
        return Activation(torch.cat([own[i] for i in inputs.tolist()]), self.tokens[inputs])


def joined(parts: list[Activation]) -> Activation:
    """The activations of successive parts of a batch as one."""
    if len(parts) == 1:
        return parts[0]
    tokens = [part.tokens for part in parts if part.tokens is not None]
    return Activation(torch.cat([part.rows for part in parts]), torch.cat(tokens) if tokens else None)
