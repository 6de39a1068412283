"""The first pass of a tuned router: the base with the adapter that `mass calibrate --kind tuned` has trained."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from massmerge.errors import InputError
from massmerge.routing.tuned import adapter_deltas


def put_adapter(tree: PreTrainedModel, kept: Mapping[str, Tensor]) -> None:
    """Give a tree over the base's tensors the weights that the adapter makes of them.

    Dense weights cost the memory of the layers once more, and no time: a first pass is as fast as without an adapter.

    Args:
        tree: a tree of its own over the base's tensors.
        kept: what was kept of the router.

    Raises:
        InputError: the adapter is not one of this base.
    """
    for name, delta in adapter_deltas(kept).items():
        path, _, own = name.rpartition(".")
        layer = dict(tree.named_modules()).get(path)
        weight = getattr(layer, own, None)
        if layer is None or weight is None or weight.shape != delta.shape:
            raise InputError(f"the router tuned was trained for another base: it changes {name}. Calibrate again.")
        setattr(layer, own, nn.Parameter(weight + delta.to(weight), requires_grad=False))
