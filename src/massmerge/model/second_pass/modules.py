"""The base's layers, each adding to its segments of the batch what their sets change.

The base's product runs once over the whole batch; only the thin products of the update run segment by segment. Weights
are never gathered per row and never built densely.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from massmerge.model.second_pass.grouped import grouped_here, grouped_updates
from massmerge.model.second_pass.segments import Segment, Segments, active, running
from massmerge.model.second_pass.updates import LowRankChange, SetChanges
from massmerge.model.speed.packed import PackedLinear, patch_layer
from massmerge.model.speed.patches import Conv, patches
from massmerge.model.trees import join_rows, take_rows


def _rows(x: Tensor, part: Segment, batch: int) -> Tensor:
    """The segment's part of a tensor; a segment that is the whole batch takes all, whatever the tensor's shape."""
    return x if part.stop - part.start == batch else x[part.start : part.stop]


def _of_rows(tensors: Sequence[Any], segments: Segments, like: Tensor) -> Tensor:
    """For each row of the batch its segment's tensor (…), as it is multiplied with `like (batch, …)`."""
    found = torch.stack(list(tensors))[segments.groups(like.device).segments]
    return found.view(len(found), *[1] * (like.ndim - found.ndim), *found.shape[1:])


class SubspaceLinear(nn.Module):
    """A linear layer (or GPT-2's Conv1D) plus the update of each segment.

    Args:
        layer: the base's layer; its tensors stay shared with the base.
        weight: name of its weight, by which sets know it; a tied weight has one name for all its layers.
        bias: name of its bias.
        transposed: whether the weight is stored (in, out).
        first_only: whether heads read the first token's row alone.
    """

    def __init__(self, layer: nn.Module, weight: str, bias: str, *, transposed: bool, first_only: bool = False) -> None:
        super().__init__()
        self.layer, self._weight, self._bias, self._transposed = layer, weight, bias, transposed
        self.first_only = first_only

    @property
    def weight(self) -> Tensor:
        """The base's weight; some models look at its dtype."""
        return self.layer.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The base's bias."""
        return self.layer.bias  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, each segment with its own update."""
        segments = active()
        if self.first_only and segments.for_heads and x.ndim == 3 and x.shape[1] > 1:
            out = x.new_zeros(*x.shape[:-1], self.weight.shape[1 if self._transposed else 0])
            out[:, :1] = self._forward(x[:, :1], segments)
            return out
        return self._forward(x, segments)

    def _forward(self, x: Tensor, segments: Segments) -> Tensor:
        if any(self._weight in part.changes.materialised for part in segments.parts):
            return torch.cat([self._one(_rows(x, part, segments.batch), part.changes) for part in segments.parts])
        out = self._product(x)  # of all rows at once
        if grouped_here(x.device, len(segments.parts)):
            return self._grouped(out, x, segments)
        for part in segments.parts:
            self._add(_rows(out, part, segments.batch), _rows(x, part, segments.batch), part.changes)
        return out

    def _grouped(self, out: Tensor, x: Tensor, segments: Segments) -> Tensor:
        """The output with the updates and biases of all segments at once."""
        groups, sets = segments.groups(x.device), [part.changes for part in segments.parts]
        added = grouped_updates(x, [own.change(self._weight).update for own in sets], groups)
        out = out if added is None else out.add_(added)
        biases = [own.change(self._bias).value for own in sets]
        if all(bias is None for bias in biases):
            return out if self.bias is None else out.add_(self.bias)
        none = out.new_zeros(out.shape[-1]) if self.bias is None else self.bias
        return out.add_(_of_rows([none if bias is None else bias for bias in biases], segments, out))

    def _product(self, x: Tensor) -> Tensor:
        """The base's product, without the bias."""
        if isinstance(self.layer, PackedLinear):
            return self.layer.product(x)
        return x @ self.weight if self._transposed else F.linear(x, self.weight)

    def _add(self, out: Tensor, x: Tensor, changes: SetChanges) -> None:
        """Add to a segment its update and its bias; a segment's rows stay in the processor's cache meanwhile."""
        rows = out.view(-1, out.shape[-1])  # a view: what is added to it is added to the output
        update = changes.change(self._weight).update
        if update is not None:
            update.add_to(rows, update.shrink(x.reshape(-1, x.shape[-1])))
        own = changes.change(self._bias).value
        bias = own if own is not None else self.bias
        if bias is not None:
            rows += bias

    def _one(self, x: Tensor, changes: SetChanges) -> Tensor:
        """A segment by itself, with the set's dense weight if that is held."""
        weight = changes.materialised.get(self._weight)
        if weight is None:
            out = self._product(x)
            self._add(out, x, changes)
            return out
        bias = changes.change(self._bias).value
        return F.linear(x, weight, bias if bias is not None else self.bias)

    @property
    def weight_name(self) -> str:
        """The name by which sets know the weight."""
        return self._weight

    def changed_by(self, changes: SetChanges) -> bool:
        """Whether a set updates the weight."""
        return changes.change(self._weight).update is not None

    def dense(self, changes: SetChanges) -> Tensor | None:
        """The set's weight (out, in) of this layer as a matrix; none where the set leaves the base's."""
        update = changes.change(self._weight).update
        if update is None:
            return None
        return (self.weight.mT if self._transposed else self.weight) + update.dense()


class SubspaceEmbedding(nn.Module):
    """An embedding plus the update of each segment: looked up in the thin factor, then expanded."""

    def __init__(self, layer: nn.Embedding, weight: str) -> None:
        super().__init__()
        self.layer, self._weight = layer, weight

    @property
    def weight(self) -> Tensor:
        """The base's table."""
        return self.layer.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Rows of the table, each segment's with its own update; positions that are the same for all inputs for each."""
        segments = active()
        if len(segments.parts) > 1 and ids.shape[0] == 1:
            ids = ids.expand(segments.batch, *ids.shape[1:])
        out: Tensor = self.layer(ids)
        for part in segments.parts:
            update = part.changes.change(self._weight).update
            if update is None:
                continue
            here = _rows(ids, part, segments.batch).flatten()
            rows = _rows(out, part, segments.batch).view(-1, out.shape[-1])
            inner = torch.cat([F.embedding(here, u) for u in update.us], 1)
            inner = inner * update.core if update.core.ndim == 1 else inner @ update.core
            for v, piece in zip(update.vs, torch.split(inner, [v.shape[0] for v in update.vs], 1), strict=True):
                rows.addmm_(piece, v)
        return out


class SubspaceConv(nn.Module):
    """A convolution plus the update of each segment: a thin convolution, then a 1×1 one."""

    def __init__(self, layer: Conv, weight: str, bias: str) -> None:
        super().__init__()
        self.layer, self._weight, self._bias = layer, weight, bias

    @property
    def weight(self) -> Tensor:
        """The base's kernel; some models look at its dtype."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, each segment with its own update."""
        out: Tensor = self.layer(x)
        segments = active()
        broadcast = (1, -1, *([1] * (out.ndim - 2)))
        for part in segments.parts:
            rows = out[part.start : part.stop]
            update = part.changes.change(self._weight).update
            if update is not None:
                rows += self._update(x[part.start : part.stop], update)
            bias = part.changes.change(self._bias).value
            if bias is not None:
                rows += (bias if self.layer.bias is None else bias - self.layer.bias).view(broadcast)
        return out

    def _update(self, x: Tensor, update: LowRankChange) -> Tensor:
        layer = self.layer
        kernel = torch.cat(update.vs).view(-1, *layer.weight.shape[1:])
        convolve: Callable[..., Tensor] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[x.ndim - 2]
        inner = convolve(x, kernel, None, layer.stride, layer.padding, layer.dilation).movedim(1, -1)
        inner = inner * update.core if update.core.ndim == 1 else inner @ update.core.mT
        return (inner @ torch.cat(update.us, 1).mT).movedim(-1, 1)


class SubspacePatches(nn.Module):
    """A convolution that cuts patches, as the first layer of a vision transformer does: a linear layer on the patches."""

    def __init__(self, layer: Conv, weight: str, bias: str) -> None:
        super().__init__()
        self.layer, self.linear = layer, SubspaceLinear(patch_layer(layer), weight, bias, transposed=False)

    @property
    def weight(self) -> Tensor:
        """The base's kernel; some models look at its dtype."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, each segment with its own update."""
        out: Tensor = self.linear(patches(x, self.layer.kernel_size))
        return out.movedim(-1, 1)


class SubspaceNorm(nn.Module):
    """A layer norm with each segment's own scale and shift: all rows are normalised at once."""

    def __init__(self, layer: nn.LayerNorm, weight: str, bias: str) -> None:
        super().__init__()
        self.layer, self._weight, self._bias = layer, weight, bias

    @property
    def weight(self) -> Tensor:
        """The base's scale; some models look at its dtype."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, each segment with its own scale and shift."""
        segments, layer = active(), self.layer
        own = [(self._own(p.changes, self._weight, layer.weight), self._own(p.changes, self._bias, layer.bias))
               for p in segments.parts]  # fmt: skip
        if len(own) == 1:
            return F.layer_norm(x, layer.normalized_shape, *own[0], layer.eps)
        out = F.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
        if grouped_here(x.device, len(own)) and all(scale is not None and shift is not None for scale, shift in own):
            scales, shifts = (_of_rows(tensors, segments, out) for tensors in zip(*own, strict=True))
            return torch.addcmul(shifts, out, scales)
        for part, (scale, shift) in zip(segments.parts, own, strict=True):
            rows = out[part.start : part.stop]
            if scale is not None and shift is not None:
                torch.addcmul(shift, rows, scale, out=rows)
            elif scale is not None:
                rows *= scale
        return out

    @staticmethod
    def _own(changes: SetChanges, name: str, base: Tensor | None) -> Tensor | None:
        value = changes.change(name).value
        return base if value is None else value


class PerSegment(nn.Module):
    """Any module whose own parameters a task may replace: norms, scales, class tokens, position tables.

    Each set has a copy of the module, made when it is first needed, in which only what the set changes is its own.

    Args:
        module: the base's module.
        make: gives the module for one set.
    """

    def __init__(self, module: nn.Module, make: Callable[[nn.Module, SetChanges], nn.Module]) -> None:
        super().__init__()
        self.module = module
        self._make = make
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        """Attributes that a model reads off its parts come from the base's module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, each segment by its own copy."""
        segments = active()
        results = []
        for part in segments.parts:
            rows, count = slice(part.start, part.stop), part.stop - part.start
            here = take_rows(args, rows, segments.batch)
            named = {k: take_rows(v, rows, segments.batch) for k, v in kwargs.items()}
            with running(Segments((Segment(part.changes, 0, count),), count, segments.for_heads)):
                results.append(self.of(part.changes)(*here, **named))
        return join_rows(results)

    def of(self, changes: SetChanges) -> nn.Module:
        """The copy of a set."""
        with self._lock:
            found = changes.modules.get(id(self))
            if found is None:
                found = changes.modules[id(self)] = self._make(self.module, changes)
            return found
