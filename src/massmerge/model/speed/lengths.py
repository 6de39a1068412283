"""Texts of a batch in groups of similar length, so that hardly any padding is computed."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from massmerge.model.speed import plain

_LEAST = 8  # rows that are worth a group of their own
_TOKENS = 160  # so are fewer rows with as many tokens: a product of them is as fast as one of more
_GAIN = 0.05  # share of a batch's tokens that must be padding before it is divided


def length_groups(batch: dict[str, Tensor]) -> list[list[int]]:
    """Positions of the rows, the longest group first; one group in the order of the batch where nothing is gained.

    Args:
        batch: tensors of the inputs (batch, …); without an attention mask (batch, tokens) there is no padding to save.
    """
    mask = batch.get("attention_mask")
    if mask is None:
        return [list(range(next(iter(batch.values())).shape[0]))]
    return grouped(_lengths(mask), mask.device)


def grouped(lengths: list[int], device: torch.device) -> list[list[int]]:
    """The same of rows with these many tokens, which run on that device."""
    rows = len(lengths)
    count = rows // _LEAST if rows >= 2 * _LEAST else min(rows // 2, sum(lengths) // _TOKENS)
    if plain() or device.type != "cpu" or count < 2:
        return [list(range(rows))]
    order = sorted(range(rows), key=lambda row: -lengths[row])
    edges = [rows * i // count for i in range(count + 1)]
    groups = [order[start:stop] for start, stop in pairwise(edges)]
    computed = sum(len(group) * lengths[group[0]] for group in groups)
    return groups if computed < (1 - _GAIN) * rows * max(lengths) else [list(range(rows))]


def trimmed(batch: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    """Some rows of a batch, without the padding that all of them end with."""
    index = torch.tensor(rows)
    mask = batch.get("attention_mask")
    if mask is None:
        return {name: tensor[index] for name, tensor in batch.items()}
    longest = max(1, *_lengths(mask[index]))
    return {
        name: tensor[index, :longest] if tensor.shape == mask.shape else tensor[index] for name, tensor in batch.items()
    }


def _lengths(mask: Tensor) -> list[int]:
    """For each row of a mask (batch, tokens) the tokens up to the last real one."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    found: list[int] = (mask.bool() * places).amax(1).tolist()
    return found


def lengthened(value: Tensor, tokens: int) -> Tensor:
    """A tensor (batch, tokens, …) with zeros behind its last token; one without tokens as it is."""
    if value.ndim < 3 or value.shape[1] >= tokens:
        return value
    return torch.cat([value, value.new_zeros(value.shape[0], tokens - value.shape[1], *value.shape[2:])], 1)
