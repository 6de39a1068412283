"""Linear layers whose weights are kept in the layout in which the processor multiplies.

A plain product first copies the weight into that layout, every time anew; for the fifty rows of one image that takes half as
long as the arithmetic. The base's weights never change, so once a layer has been used a few times its weight is packed for
good (oneDNN's layout), and the plain values, which lie in a mapped file, may leave memory.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from massmerge.model.speed import at_once, plain
from massmerge.model.speed.patches import Conv, cuts_patches, patch_linear, patches

_LEAST_VALUES = 1 << 16  # smaller weights are in the processor's cache anyway
_LEAST_ROWS = 8  # fewer rows gain nothing
_USES = 4  # products before a weight is packed: a command that answers one input need not pay for it
_PAGEOUT = 21  # MADV_PAGEOUT of Linux: pages that can be had again leave memory, all others stay


class PackedLinear(nn.Linear):
    """A linear layer that packs its weight when it is used again and again; made by `pack_layers`."""

    pack: _Pack

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return self._times(x, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """The output without the bias."""
        return self._times(x, None)

    def _times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        packed = self.pack.of(self.weight, x)
        if packed is None:
            return nn.functional.linear(x, self.weight, bias)
        return onednn_linear(x.reshape(-1, x.shape[-1]), packed, bias).view(*x.shape[:-1], self.out_features)


class PackedPatches(nn.Conv2d):
    """A convolution that cuts patches, as a product with them: for a few images faster than setting up a convolution.

    Made by `pack_layers`.
    """

    on_patches: _OnPatches

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        if self.on_patches.weight is not self.weight or not onednn_takes(self.weight):
            return super().forward(x)
        return self.on_patches.linear(patches(x, self.kernel_size)).movedim(-1, 1)


class _OnPatches:
    """The linear layer that a convolution is on its patches; copies of the convolution share it."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self.weight = layer.weight
        self.linear = patch_linear(layer)
        pack_layers(self.linear)

    def __deepcopy__(self, memo: dict[int, Any]) -> _OnPatches:
        """Trees over the same tensors share what is made of these."""
        return self


class _Pack:
    """One weight in the processor's layout, as soon as it is worth it; copies of a layer share it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._packed: Tensor | None = None
        self._alone = False
        self._uses = _USES if at_once() else 0
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Pack:
        """Trees over the same tensors share what is made of these."""
        return self

    def of(self, weight: Tensor, x: Tensor) -> Tensor | None:
        """The packed weight, for a product with these rows; none where the plain one is to be taken."""
        if weight is self.weight and self._alone:
            return self._packed
        if weight is not self.weight or x.numel() < _LEAST_ROWS * x.shape[-1] or not onednn_takes(weight):
            return None
        if self._packed is None and self._lock.acquire(blocking=False):  # who finds another at it takes the plain one
            try:
                self._uses += 1
                if self._uses > _USES and self._packed is None:
                    self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
                    _let_go(weight)
            finally:
                self._lock.release()
        return self._packed

    def keep_alone(self) -> None:
        """Pack the weight now, and give up its plain values."""
        with self._lock:
            self._packed, self._alone = torch.ops.mkldnn._reorder_linear_weight(self.weight, None), True
            self.weight.data = self.weight.new_empty(0)


def pack_layers(model: nn.Module) -> None:
    """Let the linear layers of a model whose weights never change pack them, where that can be done."""
    if plain() or not _has_onednn():
        return
    for layer in model.modules():
        # A class that is derived from these may do something else with its weight.
        if isinstance(layer, nn.Linear) and type(layer) in (nn.Linear, PackedLinear) and _worth_packing(layer.weight):
            layer.__class__ = PackedLinear
            if not _made_of(layer.__dict__.get("pack"), layer.weight):
                layer.__dict__["pack"] = _Pack(layer.weight)
        elif isinstance(layer, nn.Conv2d) and type(layer) in (nn.Conv2d, PackedPatches) and cuts_patches(layer):
            layer.__class__ = PackedPatches
            if not _made_of(layer.__dict__.get("on_patches"), layer.weight):
                layer.__dict__["on_patches"] = _OnPatches(layer)


def pack_alone(model: nn.Module) -> None:
    """Pack the layers now and empty their plain values, for a model that never runs but in inference mode.

    Args:
        model: one whose layers `pack_layers` has seen; trees over the same tensors are packed with it.
    """
    users = Counter(id(module._parameters.get("weight")) for module in model.modules())
    for layer in model.modules():
        if isinstance(layer, PackedLinear) and layer.weight.numel() and users[id(layer.weight)] == 1:
            layer.pack.keep_alone()


def _made_of(found: Any, weight: Tensor) -> bool:
    """Whether that pack has been made of this very weight."""
    return isinstance(found, _Pack | _OnPatches) and found.weight is weight


def patch_layer(layer: Conv) -> nn.Linear:
    """The linear layer that a convolution is on its patches; the one that packs its weight, if there is one."""
    found: Any = layer.__dict__.get("on_patches")
    return found.linear if _made_of(found, layer.weight) else patch_linear(layer)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x (rows, in)` through a linear layer by oneDNN; the weight `(out, in)` may be packed."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


def onednn_takes(weight: Tensor) -> bool:
    """Whether `onednn_linear` can run here: it knows no gradients, and float32 on the CPU alone is wanted of it."""
    return _on_cpu(weight) and torch.is_inference_mode_enabled() and _has_onednn()


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")  # type: ignore[no-untyped-call]


def _on_cpu(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _worth_packing(weight: Tensor) -> bool:
    return _on_cpu(weight) and weight.numel() >= _LEAST_VALUES


def _let_go(weight: Tensor) -> None:
    """Tell the system that the values will hardly be read again; those of a mapped file it can read from there."""
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(AttributeError, OSError, TypeError):  # not on Linux
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _PAGEOUT)
