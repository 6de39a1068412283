"""Module trees that share their tensors or are only watched, and outputs of which only some rows are wanted."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from massmerge.model.speed.lengths import lengthened

_M = TypeVar("_M", bound=nn.Module)


class ShapesOnly(TorchFunctionMode):
    """Inside, linear layers give zeros of the right shape: a forward pass that is only watched need not compute."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Stand in for one call."""
        if func is nn.functional.linear and len(args) >= 2:
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        return func(*args, **(kwargs or {}))


def shared_copy(module: _M) -> _M:
    """A second tree of the same modules over the same tensors: modules can be replaced in it, no weight is copied."""
    return copy.deepcopy(
        module, {id(t): t for t in (*module.parameters(), *module.buffers())} | _configurations(module)
    )


def empty_copy(module: _M) -> _M:
    """A second tree of a model without weights, to be filled. It shares no parameter: torch may fill one in its place."""
    return copy.deepcopy(module, _configurations(module))


def _configurations(module: nn.Module) -> dict[int, Any]:
    """Configurations are large and never changed; copying them takes most of the time."""
    return {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}


def replace_module(root: nn.Module, path: str, new: nn.Module) -> None:
    """Put a module in the place of another."""
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, new)


def take_rows(value: Any, rows: slice | Tensor, batch: int) -> Any:
    """The same value for some rows of a batch: tensors whose first dimension is the batch are cut, all else is kept."""
    if isinstance(value, Tensor):
        return value[rows] if value.ndim > 0 and value.shape[0] == batch else value
    if isinstance(value, dict):  # a model's output is an ordered dictionary of its own class
        cut = {k: take_rows(v, rows, batch) for k, v in value.items() if v is not None}
        return type(value)(**cut) if type(value) is not dict else cut
    if isinstance(value, tuple | list):
        return type(value)(take_rows(v, rows, batch) for v in value)
    return value


def join_rows(values: list[Any]) -> Any:
    """Put outputs for successive rows together again; zeros stand where some have fewer tokens than others."""
    first = values[0]
    if len(values) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        tokens = max(value.shape[1] for value in values) if first.ndim > 2 else 0
        return torch.cat([lengthened(value, tokens) for value in values]) if first.ndim > 0 else first
    if isinstance(first, dict):
        joined = {k: join_rows([v[k] for v in values]) for k in first}
        return type(first)(**joined) if type(first) is not dict else joined
    if isinstance(first, tuple | list):
        return type(first)(join_rows(list(parts)) for parts in zip(*values, strict=True))
    return first


def widened(value: Any) -> Any:
    """The same value with its numbers in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        wide = {k: widened(v) for k, v in value.items()}
        return type(value)(**wide) if type(value) is not dict else wide
    if isinstance(value, tuple | list):
        return type(value)(widened(v) for v in value)
    return value


def is_batched(value: Any, batch: int) -> bool:
    """Whether every tensor in a value has the batch as its first dimension."""
    if isinstance(value, Tensor):
        return value.ndim > 0 and value.shape[0] == batch
    if isinstance(value, dict):
        return all(is_batched(v, batch) for v in value.values())
    if isinstance(value, tuple | list):
        return all(is_batched(v, batch) for v in value)
    return True
