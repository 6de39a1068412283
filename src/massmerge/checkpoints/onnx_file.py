"""The weights of an ONNX file under the names of the modules that they were exported from.

A file is a protobuf message; what is needed of it is read here without the onnx package, and nothing of it runs. Exporters
keep the names of most weights, but fold the transpose of a linear layer into its matrix, which then has a number for a name.
The product that uses it still knows the module: by its own name (`/encoder/layer.0/output/dense/MatMul`), or by a note.
"""

from __future__ import annotations

import ast
import math
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from massmerge.errors import InputError, listing
from massmerge.io.tensor_file import TensorInfo, first_look, read_tensor

# Field numbers of onnx.proto.
_GRAPH = 7
_NODE, _INITIALIZER = 1, 5
_INPUT, _OUTPUT, _NODE_NAME, _OPERATION, _NOTES = 1, 2, 3, 4, 9
_DIMS, _DATA_TYPE, _FLOAT_DATA, _NAME, _RAW_DATA, _LOCATION = 1, 2, 4, 8, 9, 14
_TYPES = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
_QUANTISED = re.compile(r"DequantizeLinear|QLinear.*|.*Integer|MatMulNBits|QAttention|QGemm")
_ANONYMOUS = re.compile(r"(onnx::.*|val_\d+|\d+|/.*)")
_SCOPES = "pkg.torch.onnx.name_scopes"
_MOST = 1 << 48


class _Span(NamedTuple):
    """Where the bytes of a field lie in the file."""

    start: int
    stop: int


@dataclass
class _Node:
    """One operation of the graph."""

    operation: str = ""
    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    scopes: str = ""

    @property
    def module(self) -> str | None:
        """Path of the module that was traced here; none if the exporter did not note it."""
        if self.scopes:
            try:
                paths = ast.literal_eval(self.scopes)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return None
            known = isinstance(paths, list) and len(paths) > 1 and all(isinstance(path, str) for path in paths)
            return paths[-2] or None if known else None
        parts = self.name.strip("/").split("/")
        return ".".join(_unrepeated(parts[:-1])) if self.name.startswith("/") and len(parts) > 1 else None


def _unrepeated(parts: list[str]) -> list[str]:
    """Modules of a path. Those of a list repeat its name: `/classifier/classifier.0/Gemm` is `classifier.0`."""
    return [part for part, later in zip(parts, [*parts[1:], ""], strict=True) if not later.startswith(f"{part}.")]


class OnnxStore:
    """The floating-point weights of an ONNX file; matrices of linear layers are (out, in), as modules have them."""

    def __init__(self, path: Path) -> None:
        self._stored: dict[str, TensorInfo] = {}
        self._transposed: set[str] = set()
        weights, nodes = _read(path)
        used = {key for node in nodes if (key := self._take(node, weights)) is not None}
        self._stored = {n: i for n, i in weights.items() if n not in used} | self._stored
        self.infos: dict[str, TensorInfo] = {
            name: TensorInfo(info.shape[::-1], info.dtype) if name in self._transposed else info
            for name, info in self._stored.items()
        }

    def read(self, name: str) -> Tensor:
        """The tensor of that name, transposed where the file holds it so."""
        tensor = read_tensor(self._stored[name])
        return tensor.mT.contiguous() if name in self._transposed else tensor

    def start(self, name: str, skip: int = 0) -> bytes | None:
        """The first bytes of a tensor that is not transposed."""
        return None if name in self._transposed else first_look(self._stored[name], skip)

    def _take(self, node: _Node, weights: dict[str, TensorInfo]) -> str | None:
        """Give a weight the name that an operation knows it by; returns the name that it has in the file."""
        if node.operation == "Identity" and node.inputs and node.inputs[0] in weights:
            self._stored |= dict.fromkeys(node.outputs, weights[node.inputs[0]])  # equal weights are stored once
        if node.operation != "MatMul" or len(node.inputs) < 2 or not _ANONYMOUS.fullmatch(node.inputs[1]):
            return None
        info, module = weights.get(node.inputs[1]), node.module
        if info is None or module is None or len(info.shape) != 2:
            return None
        self._stored[f"{module}.weight"] = info
        self._transposed.add(f"{module}.weight")
        return node.inputs[1]


def _read(path: Path) -> tuple[dict[str, TensorInfo], list[_Node]]:
    """Weights under the names in the file, and the operations.

    Raises:
        InputError: not an ONNX file, damaged, or its weights are quantised or lie elsewhere.
    """
    weights: dict[str, TensorInfo] = {}
    nodes: list[_Node] = []
    with path.open("rb") as file:
        if not file.seek(0, 2):
            raise InputError(f"{path}: empty. Download or export it again.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                for number, graph in _fields(data, _Span(0, len(data))):
                    if number != _GRAPH or not isinstance(graph, _Span):
                        continue
                    for inner, part in _fields(data, graph):
                        if inner == _NODE and isinstance(part, _Span):
                            nodes.append(_node(data, part))
                        elif inner == _INITIALIZER and isinstance(part, _Span):
                            weights |= _tensor(data, part, path)
            except (ValueError, IndexError) as error:
                raise InputError(
                    f"{path}: not an ONNX file, or damaged ({error}). Download or export it again."
                ) from None
    quantised = sorted({node.operation for node in nodes if _QUANTISED.fullmatch(node.operation)})
    if quantised:
        raise InputError(
            f"{path}: its weights are quantised ({', '.join(quantised)}). A delta needs the weights as they were "
            "trained: use the float32 or float16 file, or the checkpoint that it was exported from."
        )
    if not weights:
        raise InputError(f"{path}: contains no weights. Download or export it again.")
    return weights, nodes


def _node(data: mmap.mmap, message: _Span) -> _Node:
    node = _Node()
    for number, value in _fields(data, message):
        if not isinstance(value, _Span):
            continue
        if number in (_INPUT, _OUTPUT):
            (node.inputs if number == _INPUT else node.outputs).append(_text(data, value))
        elif number == _NODE_NAME:
            node.name = _text(data, value)
        elif number == _OPERATION:
            node.operation = _text(data, value)
        elif number == _NOTES:
            note = dict(_fields(data, value))
            if all(isinstance(note.get(i), _Span) for i in (1, 2)) and _text(data, note[1]) == _SCOPES:
                node.scopes = _text(data, note[2])
    return node


def _tensor(data: mmap.mmap, message: _Span, path: Path) -> dict[str, TensorInfo]:
    """Name and place of one weight; nothing if it is no floating-point tensor."""
    dims: list[int] = []
    name, kind, place, elsewhere = "", 0, _Span(0, 0), False
    for number, value in _fields(data, message):
        if number == _DIMS:
            dims += [value] if isinstance(value, int) else list(_varints(data, value))
        elif number == _DATA_TYPE and isinstance(value, int):
            kind = value
        elif number == _NAME and isinstance(value, _Span):
            name = _text(data, value)
        elif number in (_RAW_DATA, _FLOAT_DATA) and isinstance(value, _Span):
            place = value
        elif number == _LOCATION:
            elsewhere = bool(value)
    if kind not in _TYPES:
        return {}
    if elsewhere:
        raise InputError(
            f"{path}: its weights lie in another file. Save it as one: `onnx.save(onnx.load(FILE), NEW)`."
            f"{listing([name])}"
        )
    info = TensorInfo(tuple(dims), _TYPES[kind], path, place.start)
    if any(not 0 <= size < _MOST for size in dims) or info.nbytes != place.stop - place.start:
        raise ValueError(f"{name}: shape {tuple(dims)} does not match its {place.stop - place.start} bytes")
    return {name: info} if math.prod(dims) else {}


def _text(data: mmap.mmap, place: int | _Span) -> str:
    assert isinstance(place, _Span)
    return data[place.start : place.stop].decode()


def _fields(data: mmap.mmap, message: _Span) -> Iterator[tuple[int, int | _Span]]:
    """Number and value of every field of a message: whole numbers, or where the bytes of it lie."""
    at = message.start
    while at < message.stop:
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field of kind {wire} at byte {at}")
        if size > message.stop - at:
            raise ValueError(f"a field of {size} bytes at byte {at}, past its end")
        yield key >> 3, _Span(at, at + size)
        at += size


def _varints(data: mmap.mmap, place: _Span) -> Iterator[int]:
    at = place.start
    while at < place.stop:
        value, at = _varint(data, at)
        yield value


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A whole number in groups of seven bits, lowest first, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError(f"a number without an end at byte {at}")
