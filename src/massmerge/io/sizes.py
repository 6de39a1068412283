"""Sizes as people write them."""

from __future__ import annotations

import re

from massmerge.errors import InputError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(size: str | int) -> int:
    """Bytes from a number or from words such as `512MB`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?I?B?)\s*", str(size).upper())
    if not found or found[2] not in _UNITS:
        raise InputError(f"{size!r} is no size; write bytes, or 512MB, or 2GiB.")
    return int(float(found[1]) * _UNITS[found[2]])
