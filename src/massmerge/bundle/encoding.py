"""How the numbers of factors are stored: in the base's type, in 16 bits, or in 8 with a scale for every vector."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from massmerge.linalg.factors import Factors
from massmerge.recipe import FactorType

PARTS = ("u", "s", "v", "scale")
SMALL_SIDE = 16
"""Matrices with a side this small (token types, position buckets) weigh nothing and are kept as they are."""
_LARGEST = 127  # of int8, and of its negative: -128 is not used


def stored_type(factors: FactorType, base: torch.dtype, matrix: tuple[int, int]) -> torch.dtype:
    """The type of a matrix's `u` and `v`; a base of 16 bits keeps its own type, and so does a small matrix."""
    if min(matrix) <= SMALL_SIDE:
        return base
    if factors == "int8":
        return torch.int8
    return torch.float16 if factors == "float16" and base.itemsize > 2 else base


def part_shapes(
    matrix: tuple[int, int], rank: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every stored part of a matrix's factors."""
    (m, n), single = matrix, torch.float32
    shapes = {"u": ((m, rank), dtype), "s": ((rank,), single), "v": ((rank, n), dtype)}
    # 127 times the 8 significant bits of bfloat16 is exact in float32: what is decoded and encoded again keeps its bytes.
    return shapes | ({"scale": ((2, rank), torch.bfloat16)} if dtype == torch.int8 else {})


def encode(factors: Factors, dtype: torch.dtype) -> dict[str, Tensor]:
    """Factors as they are stored, by part.

    In int8, `scale (2, k)` holds the step between two numbers of each column of `u` and of each row of `v`: their largest
    number is 127 steps. No entry moves by more than half a step.
    """
    if dtype != torch.int8:
        return {"u": factors.u.to(dtype), "s": factors.s, "v": factors.v.to(dtype)}
    u, u_scale = _rounded(factors.u.mT)
    v, v_scale = _rounded(factors.v)
    return {"u": u.mT.contiguous(), "s": factors.s, "v": v, "scale": torch.stack([u_scale, v_scale])}


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (k, n) in int8, and the step (k,) of each."""
    rows = rows.float()
    step = (rows.abs().amax(1) / _LARGEST).bfloat16()
    return (rows / step.float().clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8), step


def decode(parts: Mapping[str, Tensor]) -> Factors:
    """Factors from their stored parts: those in int8 as float32, others as they are."""
    u, s, v = (parts[name] for name in PARTS[:3])
    if u.dtype != torch.int8:
        return Factors(u, s, v)
    u_scale, v_scale = parts["scale"].float()
    return Factors(u * u_scale, s, v * v_scale[:, None])


def rounding(parts: Mapping[str, Tensor]) -> float:
    """How far int8 may have moved the product of factors, as a share of its length; 0 in other types.

    Every entry moves by half a step at most. Vectors are orthogonal, so what they move by adds up in squares.
    """
    if parts["u"].dtype != torch.int8:
        return 0.0
    squares = parts["s"].double().square()
    sides = torch.tensor([[parts["u"].shape[0]], [parts["v"].shape[1]]], dtype=torch.float64)
    moved = (parts["scale"].double() / 2).square() * sides
    return float(((moved * squares).sum(1) / squares.sum().clamp_min(1e-300)).sqrt().sum())
