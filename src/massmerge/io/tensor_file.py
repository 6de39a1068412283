"""Safetensors files read and written one tensor at a time.

The library's own reader maps the whole file, so every page that was read counts as resident memory until the file is
closed, and it has no writer that appends. Both matter here: a merge reads twenty experts in the memory of one, and a
bundle's files are put together from parts. The format is eight bytes of length, a JSON header, and the bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from io import RawIOBase
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from massmerge.errors import InputError
from massmerge.io.remote import RemoteFile

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # the format's own limit
_COUNT_LIMIT = 1 << 48  # more than any disk holds, and few enough that torch can multiply two of them
_START = 1 << 16
_FEW = 1 << 12
_COPIED = 1 << 19  # bytes at a time; a buffer that is used again costs no new pages


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor, and where its bytes lie."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path | RemoteFile | None = None
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def shares_bytes(self, other: TensorInfo) -> bool:
        """Whether the two are one tensor under two names; never where the data is elsewhere."""
        return self.path is not None and (self.path, self.offset) == (other.path, other.offset)


def read_header(path: Path | RemoteFile) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, from its header alone.

    Raises:
        InputError: the file is not a safetensors file, or is truncated.
    """
    try:
        size = path.stat().st_size if isinstance(path, Path) else path.size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_LIMIT):
                raise ValueError(f"its header would be {length} bytes long, the file has {size}")
            entries = json.loads(file.read(length), object_pairs_hook=_unique)
        if not isinstance(entries, dict):
            raise ValueError("its header is not a mapping")
        entries.pop("__metadata__", None)
        infos = {name: _info(entry, path, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(f"{path}: not a safetensors file, or damaged ({error}). Download or save it again.") from None
    end = 8 + length
    # As the library that writes such files demands: one tensor after the other, to the last byte of the file.
    for name, info in sorted(infos.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != end:
            kind = "a gap before" if info.offset > end else "an overlap at"
            raise InputError(f"{path}: damaged: {kind} {name}. Download or save it again.")
        end += info.nbytes
    if end != size:
        raise InputError(
            f"{path}: damaged: its header describes {end} bytes, the file has {size}. Download or save it again."
        )
    return infos


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which no key stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in its header")
    return found


def _whole(number: Any) -> int:
    """A number of a header, which JSON can also spell as a word or a fraction."""
    if type(number) is not int or not 0 <= number < _COUNT_LIMIT:
        raise ValueError(f"{number!r} is not a valid count")
    return number


def _info(entry: dict[str, Any], path: Path | RemoteFile, start: int) -> TensorInfo:
    shape = tuple(map(_whole, entry["shape"]))
    begin, stop = map(_whole, entry["data_offsets"])
    info = TensorInfo(shape, DTYPES[str(entry["dtype"])], path, start + begin)
    if stop - begin != info.nbytes:
        raise ValueError(f"shape {shape} does not match bytes {begin} to {stop}")
    return info


def read_bytes(info: TensorInfo) -> bytearray:
    """The raw bytes of a stored tensor."""
    data = bytearray(info.nbytes)
    for _ in _filled(memoryview(data), info):
        pass
    return data


def _filled(buffer: memoryview, info: TensorInfo) -> Iterator[memoryview]:
    """The bytes of a stored tensor, as many at a time as a buffer holds, which is filled again and again."""
    assert info.path is not None, "the tensor's data is not on this machine"
    left = info.nbytes
    with info.path.open("rb", buffering=0) as file:
        file.seek(info.offset)
        while left:
            view, done = buffer[:left], 0
            while done < len(view):
                count = cast(RawIOBase, file).readinto(view[done:])
                if not count:
                    raise InputError(f"{info.path}: truncated while it was being read. Download or save it again.")
                done += count
            left -= done
            yield view


def read_start(info: TensorInfo, skip: int = 0, most: int = _START) -> bytes:
    """The first bytes of a stored tensor, or the first after so many."""
    assert info.path is not None, "the tensor's data is not on this machine"
    with info.path.open("rb", buffering=0) as file:
        file.seek(info.offset + skip)
        return file.read(min(info.nbytes - skip, most))


def first_look(info: TensorInfo, skip: int = 0) -> bytes:
    """The first bytes of a stored tensor; few of them where each look is a request."""
    return _remote_start(info, skip) if isinstance(info.path, RemoteFile) else read_start(info, skip)


@lru_cache(maxsize=8192)
def _remote_start(info: TensorInfo, skip: int) -> bytes:
    """The first few bytes of a tensor in a store, kept: each expert is compared with the same base."""
    return read_start(info, skip, _FEW)


def read_tensor(info: TensorInfo) -> Tensor:
    """A stored tensor, in memory of its own."""
    data = read_bytes(info)
    return (
        torch.frombuffer(data, dtype=info.dtype).reshape(info.shape)
        if data
        else torch.empty(info.shape, dtype=info.dtype)
    )


def read_span(info: TensorInfo, start: int, stop: int) -> Tensor:
    """Numbers of a stored tensor in a row (stop - start,), by their places in the flattened tensor."""
    return read_tensor(TensorInfo((stop - start,), info.dtype, info.path, info.offset + start * info.dtype.itemsize))


def map_file(path: Path) -> Tensor:
    """The bytes of a file, which come into memory as they are used; nothing that is written to them reaches the file."""
    return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)


def tensor_in(data: Tensor, info: TensorInfo) -> Tensor:
    """A stored tensor as a view of its file's bytes."""
    found = data[info.offset : info.offset + info.nbytes]
    if info.offset % info.dtype.itemsize:  # behind an odd number of bytes there is no view
        found = found.clone()
    return found.view(info.dtype).reshape(info.shape)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's data as little-endian bytes."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(cast(Any, flat.view(torch.uint8).numpy())) if flat.numel() else memoryview(b"")


def header_bytes(infos: dict[str, TensorInfo]) -> bytes:
    """A safetensors header for tensors that will follow in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, info in infos.items():
        entries[name] = {
            "dtype": _CODES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [begin, begin + info.nbytes],
        }
        begin += info.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of eight, as the format asks
    return len(text).to_bytes(8, "little") + text


def write_stream(path: Path, infos: dict[str, TensorInfo], data: Iterable[memoryview | TensorInfo]) -> None:
    """Write a safetensors file from tensors that arrive one after the other, in the order of `infos`.

    Args:
        path: the file.
        infos: what it will hold.
        data: each tensor's bytes, or the place in another file that they are copied from.
    """
    buffer = memoryview(bytearray(min(_COPIED, max((info.nbytes for info in infos.values()), default=0))))
    with path.open("wb") as file:
        file.write(header_bytes(infos))
        for info, given in zip(infos.values(), data, strict=True):
            if given.nbytes != info.nbytes:
                raise ValueError(f"{path}: {given.nbytes} bytes for a tensor of {info.nbytes}")
            for piece in _pieces(buffer, given):
                file.write(piece)


def _pieces(buffer: memoryview, given: memoryview | TensorInfo) -> Iterable[memoryview]:
    """The bytes of a tensor; from a store they come with one request."""
    if not isinstance(given, TensorInfo):
        return (given,)
    return (memoryview(read_bytes(given)),) if isinstance(given.path, RemoteFile) else _filled(buffer, given)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a safetensors file, sorted by name so that the same tensors give the same bytes."""
    names = sorted(tensors)
    infos = {name: TensorInfo(tuple(tensors[name].shape), tensors[name].dtype) for name in names}
    write_stream(path, infos, (tensor_bytes(tensors[name]) for name in names))


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a safetensors file, one after the other."""
    for name, info in read_header(path).items():
        yield name, read_tensor(info)
