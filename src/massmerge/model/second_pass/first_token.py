"""Which layers the heads read at the first token only, so that their other rows need not be computed.

A head that reads the class token looks at one row of the last block. The block's queries, its output layer and its MLP are
computed for all tokens all the same: most of a block, of which a sixth is read. Which layers these are is found by a pass in
which their other rows are spoilt (not a number): what still comes out whole has not read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from massmerge.model.heads.classify import Head
from massmerge.model.trees import ShapesOnly

_CANDIDATES = 8  # linear layers at the end of a backbone: those of the last block, and a pooler's


class _KeepsSpoilt(ShapesOnly):
    """Inside, linear layers and attention compute nothing, but what they read of spoilt rows is spoilt."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Stand in for one call."""
        if func is nn.functional.scaled_dot_product_attention and len(args) >= 3:
            return _attended(*args[:3])
        out = super().__torch_function__(func, types, args, kwargs)
        return out + 0 * args[0].sum(-1, keepdim=True) if func is nn.functional.linear and len(args) >= 2 else out


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros, spoilt where a query is and wherever any key or value of the input is: kernels take them for masked ones."""
    read = q.sum(-1, keepdim=True) + (k.sum((1, 2, 3)) + v.sum((1, 2, 3)))[:, None, None, None]
    return 0 * read.expand(*q.shape[:-1], v.shape[-1])


@torch.inference_mode()
def first_token_layers(
    base: PreTrainedModel, called: Iterable[str], heads: Iterable[Head], inputs: dict[str, Tensor], call: dict[str, Any]
) -> set[str]:
    """Paths of linear layers of which every head reads the first token's row, and no other.

    Args:
        base: the base.
        called: paths of the modules that a pass calls.
        heads: of all tasks.
        inputs: one input, the batch (1, …) of a probe.
        call: how the backbone is called with it.
    """
    heads, there = list(heads), set(called)
    layers = [(path, m) for path, m in base.named_modules() if isinstance(m, nn.Linear) and path in there][
        -_CANDIDATES:
    ]
    if not heads or not layers:
        return set()
    count = len(layers)
    # Two inputs for each layer: in one the first token's row of that layer is spoilt, in the other one all others.
    repeated, asked = (_repeated(tensors, 2 * count) for tensors in (inputs, call))
    handles = [layer.register_forward_hook(_spoil(place, count)) for place, (_, layer) in enumerate(layers)]
    try:
        with _KeepsSpoilt():
            output = base(**asked)
            logits = [head(output, repeated) for head in heads]
    finally:
        for handle in handles:
            handle.remove()
    whole = torch.stack([found.isfinite().all(1) for found in logits])
    fine = ~whole[:, :count].any(0) & whole[:, count:].all(0)
    return {path for (path, _), first_only in zip(layers, fine.tolist(), strict=True) if first_only}


def _repeated(tensors: dict[str, Any], count: int) -> dict[str, Any]:
    return {k: v.repeat_interleave(count, 0) if isinstance(v, Tensor) else v for k, v in tensors.items()}


def _spoil(place: int, count: int) -> Any:
    def spoil(_: nn.Module, __: Any, output: Tensor) -> None:
        """The rows of a layer's two inputs; without tokens both are spoilt, and the layer is found to be read as a whole."""
        tokens = output.ndim == 3
        output[place, slice(1) if tokens else slice(None)] = torch.nan
        output[count + place, slice(1, None) if tokens else slice(None)] = torch.nan

    return spoil
