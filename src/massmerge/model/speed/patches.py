"""Convolutions that cut patches, as the first layer of a vision transformer does: linear layers on the patches."""

from __future__ import annotations

from torch import Tensor, nn

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def cuts_patches(layer: Conv) -> bool:
    """Whether a convolution is a linear layer on patches: they lie side by side, and nothing is padded."""
    beside = layer.stride == layer.kernel_size and set(layer.dilation) == {1}
    return beside and set(layer.padding) <= {0} and layer.groups == 1


def patches(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The patches of images as rows (batch, …, values of a patch)."""
    for axis, size in enumerate(sizes):
        x = x.unfold(2 + axis, size, size)
    return x.movedim(1, -1 - len(sizes)).flatten(-1 - len(sizes))


def patch_linear(layer: Conv) -> nn.Linear:
    """The linear layer that a convolution is on its patches, over the same tensors."""
    kernel, shift = layer.weight.flatten(1), layer.bias  # a view: the tensor stays the base's
    linear = nn.Linear(kernel.shape[1], kernel.shape[0], bias=shift is not None, device="meta")
    linear.weight, linear.bias = nn.Parameter(kernel, requires_grad=False), shift  # type: ignore[assignment]
    return linear
