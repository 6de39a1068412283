"""Names of the types that models run in."""

from __future__ import annotations

from typing import Literal, get_args

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(Dtype)
