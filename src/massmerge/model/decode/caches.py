"""Key-value caches of rows that join and leave a batch: all rows end at the same column, shorter ones have padding before.

A cache of transformers holds for every block keys and values (rows, heads, columns, width). Attention masks hide the
padding, so that its values do not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache


def columns(cache: DynamicCache) -> int:
    """How many tokens the longest row has."""
    return int(cache.get_seq_length())


def join(first: DynamicCache, second: DynamicCache) -> DynamicCache:
    """The rows of two caches, those of the first before those of the second."""
    length = max(columns(first), columns(second))
    for own, other in zip(first.layers, second.layers, strict=True):
        own.keys = torch.cat([_padded(own.keys, length), _padded(other.keys, length)])
        own.values = torch.cat([_padded(own.values, length), _padded(other.values, length)])
    return first


def keep(cache: DynamicCache, rows: list[int], longest: int) -> None:
    """Leave some rows only, in this order, and as many columns at the end as the longest of them has tokens."""
    count = cache.layers[0].keys.shape[0]
    index = None if rows == list(range(count)) else torch.tensor(rows, device=cache.layers[0].keys.device)
    for layer in cache.layers:
        layer.keys, layer.values = (_kept(part, index, longest) for part in (layer.keys, layer.values))


def _kept(part: Tensor, index: Tensor | None, longest: int) -> Tensor:
    part = part[:, :, part.shape[2] - longest :]
    return part if index is None else part.index_select(0, index)


def _padded(part: Tensor, length: int) -> Tensor:
    return pad(part, (0, 0, length - part.shape[2], 0))
