"""What of a base no first pass reads: blocks behind the last voting site, a decoder. A model that only routes drops it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from massmerge.model.route.first_pass import FirstPass
from massmerge.routing.sites import probe_inputs

_BLOCK = re.compile(r"(?:.*?\.)?\d+\.")  # as in the names of sites: up to the first number of a path


def drop_unused(base: PreTrainedModel, passes: Sequence[FirstPass]) -> int:
    """Empty the tensors that no first pass reads; returns how many bytes they had.

    A block counts as a whole where any of it is read, for inputs may differ in what they call (a mixture's experts). Only of
    the block in which a pass stops, what lies behind the stop is emptied.

    Args:
        base: the base, whose tensors the passes' models share as far as those do not have their own.
        passes: the passes that are made.
    """
    used: set[int] = set()
    for one in passes:
        with _Noted(used), torch.inference_mode():
            one.collect(probe_inputs(one.model))
    last = {max(one.voters, key=lambda voter: voter.site.depth).site.modules[0] for one in passes}
    stops = {_block(f"{path}.") for path in last}
    tensors = [*base.named_parameters(remove_duplicate=False), *base.named_buffers(remove_duplicate=False)]
    blocks = {_block(name) for name, tensor in tensors if id(tensor) in used} - stops
    kept = used | {id(tensor) for name, tensor in tensors if _block(name) in blocks}
    dropped = {id(tensor): tensor for _, tensor in tensors if id(tensor) not in kept}
    freed = sum(tensor.nbytes for tensor in dropped.values())
    for tensor in dropped.values():  # the same object stands in every tree
        tensor.data = tensor.new_empty(0)
    return freed


def _block(name: str) -> str:
    """The numbered block that a tensor is of, or its own module where it is of none."""
    found = _BLOCK.match(name)
    return found[0] if found else name.rpartition(".")[0]


class _Noted(TorchFunctionMode):
    """Notes every tensor that is handed to a function inside."""

    def __init__(self, used: set[int]) -> None:
        super().__init__()
        self._used = used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note, and call."""
        given = (*args, *(kwargs or {}).values())
        self._used.update(id(one) for one in given if isinstance(one, Tensor))
        return func(*args, **(kwargs or {}))
