"""Which voters tell a bundle's own inputs from foreign ones. Chosen on validation rows; see docs/research/routing.md."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST = 1e-3  # so that one voter for which a task holds nothing does not decide alone


def deeper(voters: Sequence[str]) -> list[int]:
    """Places of the voters in the deeper half of the blocks; of all where some stand in no block.

    Early blocks see letters and single words, and hold about as much of foreign inputs as of own ones.

    Args:
        voters: their names, such as `O3.mean`.
    """
    found = [re.match(r"[A-Z](\d+)\.", voter) for voter in voters]
    blocks = [int(match[1]) for match in found if match]
    if len(blocks) < len(voters) or not blocks:
        return list(range(len(voters)))
    distinct = sorted(set(blocks))
    return [i for i, block in enumerate(blocks) if block >= distinct[len(distinct) // 2]]


def mean_lift(lifts: Sequence[Tensor], voters: Sequence[str]) -> Tensor:
    """The geometric mean of the lifts (n, T) of the deeper voters, of outputs of the attention where there are such.

    Args:
        lifts: of each voter.
        voters: their names.
    """
    deep = deeper(voters)
    outputs = [i for i in deep if voters[i].startswith("O")] or deep
    found = torch.stack([lifts[i] for i in outputs])
    return found.clamp_min(_LEAST).log().mean(0).exp() * (found.amax(0) > 0)
