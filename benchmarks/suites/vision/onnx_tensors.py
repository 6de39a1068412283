"""The weights of an ONNX file, read without the onnx package: a file is a protobuf message, its weights are one field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from massmerge.errors import InputError

# Field numbers of onnx.proto: a model's graph, a graph's weights, and what a weight consists of.
_GRAPH, _INITIALIZER = 7, 5
_DIMS, _DATA_TYPE, _NAME, _RAW_DATA = 1, 2, 8, 9
_FLOAT = 1


def read_onnx(path: Path) -> dict[str, torch.Tensor]:
    """All float32 weights of an ONNX file by name, in the order of the file."""
    weights: dict[str, torch.Tensor] = {}
    for number, graph in _fields(memoryview(path.read_bytes())):
        if number == _GRAPH and isinstance(graph, memoryview):
            for inner, tensor in _fields(graph):
                if inner == _INITIALIZER and isinstance(tensor, memoryview):
                    weights.update(_tensor(tensor))
    if not weights:
        raise InputError(f"{path}: no weights in it; not an ONNX file, or damaged. Download it again.")
    return weights


def _tensor(message: memoryview) -> dict[str, torch.Tensor]:
    """Name and value of one weight; nothing if it is no float32 or its values do not lie in the message."""
    dims: list[int] = []
    name, kind, data = "", 0, memoryview(b"")
    for number, value in _fields(message):
        if number == _DIMS:
            dims += [value] if isinstance(value, int) else list(_varints(value))
        elif number == _DATA_TYPE and isinstance(value, int):
            kind = value
        elif number == _NAME and isinstance(value, memoryview):
            name = bytes(value).decode()
        elif number == _RAW_DATA and isinstance(value, memoryview):
            data = value
    if kind != _FLOAT or not len(data):
        return {}
    return {name: torch.from_numpy(np.frombuffer(data, dtype="<f4").reshape(dims).copy())}


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of every field of a protobuf message: whole numbers, or bytes of whatever lies inside."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise InputError(f"not an ONNX file: field of kind {wire} at byte {at}. Download it again.")
        yield key >> 3, message[at : at + size]
        at += size


def _varints(message: memoryview) -> Iterator[int]:
    at = 0
    while at < len(message):
        value, at = _varint(message, at)
        yield value


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A whole number in groups of seven bits, lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value, at
