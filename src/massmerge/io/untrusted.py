"""Configurations that others wrote: whether they name code, or sizes that no model has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from massmerge.errors import InputError, listing
from massmerge.io.json_file import read_json

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
IMAGE_CONFIGS = ("preprocessor_config.json", "processor_config.json", "image_processor_config.json")
CONFIGS = (CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, *IMAGE_CONFIGS)
"""The files that say which classes transformers makes, and how."""
_CODE = {
    "auto_map": "names custom classes",
    "trust_remote_code": "allows custom code",
    "custom_generate": "names custom code",
    "custom_pipelines": "names custom code",
    "kernel_config": "names remote code",
    "attribute_map": "renames fields of the configuration",
    "quantization_config": "is for quantised weights, which cannot be merged; load the model with transformers, "
    "`model.dequantize().save_pretrained(FOLDER)`, and use that folder",
}
# What transformers or torch bring along. Other names are kernels of the hub, or replaced by one where they are missing.
_BUILT_IN = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
_MOST_LABELS, _MOST_PARTS, _MOST_PIXELS = 1_000_000, 10_000, 10_000
_MOST_BEAMS, _DEEPEST = 1000, 50
_BEAMS = ("num_beams", "num_beam_groups", "num_return_sequences")
_SIDES = ("height", "width", "shortest_edge")


def refuse_code(folder: Path, names: Sequence[str] = CONFIGS) -> None:
    """Raise an error if one of these files names code, or sizes that no model has.

    Raises:
        InputError: it names the file and says what to do.
    """
    for name in names:
        path = folder / name
        if path.is_file():
            with suppress(ValueError):  # damaged: nothing comes of it, and who opens it will say so
                refuse(path, faults_in(read_json(path)))


def refuse(where: Path | str, faults: Iterator[str]) -> None:
    """Raise an error that lists the faults, if there are any."""
    found = list(dict.fromkeys(faults))
    if found:
        raise InputError(
            f"{where}: refused:{listing(found)}\n"
            "  massmerge runs no code from models and bounds their size. Remove these fields if the model works "
            "without them."
        )


def faults_in(value: Any, depth: int = 0) -> Iterator[str]:
    """What is wrong with a configuration, as JSON or as an object: fields that name code, and sizes that no model has."""
    if depth > _DEEPEST:  # libraries copy configurations level by level, and fail in any way
        yield f"it is nested in more than {_DEEPEST} levels"
        return
    if hasattr(value, "model_type"):  # a configuration of transformers, which this module does not import
        value = vars(value)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _field_faults(str(key), inner)
            yield from faults_in(inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from faults_in(inner, depth + 1)


def _field_faults(key: str, value: Any) -> Iterator[str]:
    if key in _CODE and value and (value is True or isinstance(value, Mapping | list | tuple | str)):
        yield f"`{key}` {_CODE[key]}"
    built_in = _BUILT_IN.get(key.removeprefix("_").removesuffix("_internal"))
    for choice in value.values() if isinstance(value, Mapping) else [value]:
        if built_in and choice is not None and choice not in built_in:
            yield f"`{key}` is {choice!r}, which may be remote code; supported: {', '.join(built_in)}"
    if isinstance(value, int | float) and value > _limit(key):
        yield f"`{key}` is {value:,}; the maximum is {_limit(key):,}"


def _limit(key: str) -> float:
    """The largest number that a field may hold, where transformers would make as many things as it says."""
    if key == "num_labels":
        return _MOST_LABELS
    if "layer" in key or "depth" in key:
        return _MOST_PARTS
    if key in _BEAMS:
        return _MOST_BEAMS
    return _MOST_PIXELS if key in _SIDES else math.inf
