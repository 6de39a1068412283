"""Names in a recipe: a list, or a file with one per line."""

from __future__ import annotations

from pathlib import Path

from massmerge.errors import InputError
from massmerge.io.json_file import parse_json
from massmerge.io.remote_cache import path_of


def repeated(labels: tuple[str, ...]) -> str:
    """The labels that are there more than once, quoted; empty where there are none."""
    return ", ".join(map(repr, sorted({label for label in labels if labels.count(label) > 1})))


def read_labels(labels: str | list[str], folder: Path) -> tuple[str, ...]:
    """Label names: a list, or a file with one per line or a JSON list."""
    if isinstance(labels, list):
        return tuple(labels)
    path = path_of(labels, folder)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{labels}: cannot be read as labels ({error}).") from None
    if path.suffix == ".json":
        try:
            names = parse_json(text)
        except ValueError as error:
            raise InputError(f"{labels}: not valid JSON ({error}).") from None
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise InputError(f"{labels}: must be a JSON list of strings.")
        return tuple(names)
    return tuple(line.strip() for line in text.splitlines() if line.strip())
