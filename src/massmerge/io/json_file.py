"""JSON that others wrote. Whatever is wrong with it is a `ValueError`, brackets within brackets without end included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from massmerge.errors import InputError


def parse_json(text: str | bytes) -> Any:
    """What a text in JSON says.

    Raises:
        ValueError: it is not valid, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> Any:
    """What a file in JSON says; errors as above."""
    return parse_json(path.read_text(encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        InputError: it holds anything else.
    """
    try:
        data = read_json(path)
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}). Download or save it again.") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: holds no JSON object. Download or save it again.")
    return data
