"""Where tensors lie: a set of files under one set of names, with shapes known before a byte of data is read."""

from __future__ import annotations

import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from massmerge.checkpoints.onnx_file import OnnxStore
from massmerge.errors import InputError, listing
from massmerge.io.remote import RemoteFile
from massmerge.io.shards import INDEX, shard_names
from massmerge.io.tensor_file import TensorInfo, first_look, map_file, read_header, read_tensor, tensor_in


class Store(Protocol):
    """Tensors under the names of a checkpoint file."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor of that name."""
        ...

    def start(self, name: str, skip: int = 0) -> bytes | None:
        """The first bytes of a tensor, or the first after so many; None where they cannot be read by themselves."""
        ...


class SafetensorsStore:
    """One safetensors file, or several that together hold one state dict."""

    def __init__(self, paths: Sequence[Path | RemoteFile]) -> None:
        self.infos: dict[str, TensorInfo] = {}
        self._mapped: dict[Path, Tensor] = {}
        for path in paths:
            self.infos.update(read_header(path))

    def read(self, name: str) -> Tensor:
        """The tensor of that name, read from its file."""
        return read_tensor(self.infos[name])

    def start(self, name: str, skip: int = 0) -> bytes | None:
        """The first bytes of a tensor, from its file."""
        return first_look(self.infos[name], skip)

    def mapped(self, name: str) -> Tensor:
        """The tensor of that name where it lies in its file; the file must stay as it is."""
        info = self.infos[name]
        assert isinstance(info.path, Path), "who maps files has downloaded them"
        if info.path not in self._mapped:
            self._mapped[info.path] = map_file(info.path)
        return tensor_in(self._mapped[info.path], info)


class PickleStore:
    """State dicts written by `torch.save`, opened for tensors only and mapped, not loaded."""

    def __init__(self, paths: list[Path]) -> None:
        self.infos: dict[str, TensorInfo] = {}
        self._plain: set[str] = set()
        for path in paths:
            mapped, places = _load_pickle(path), _places(path)
            self._plain |= places.keys()
            for name, tensor in mapped.items():
                # Without a place the offset means nothing but that tensors which share their bytes have the same.
                info = TensorInfo(tuple(tensor.shape), tensor.dtype, path, tensor.data_ptr())
                self.infos[name] = places.get(name, info)

    def read(self, name: str) -> Tensor:
        """The tensor of that name; no page of the file stays resident afterwards."""
        info = self.infos[name]
        if name in self._plain:
            return read_tensor(info)
        assert isinstance(info.path, Path)
        return _load_pickle(info.path)[name].detach().clone()

    def start(self, name: str, skip: int = 0) -> bytes | None:
        """The first bytes of a tensor that is stored as it is."""
        return first_look(self.infos[name], skip) if name in self._plain else None


def _places(path: Path) -> dict[str, TensorInfo]:
    """Where in the file the tensors lie that are stored as they are; to unpickle it for each read would take far longer."""
    if not _is_zip(path) or not _of_this_byte_order(path):
        return {}
    with FakeTensorMode():
        state = _load_pickle(path, mapped=False)
    found = {}
    for name, tensor in state.items():
        begin = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if begin is not None and tensor.is_contiguous():
            offset = begin + tensor.storage_offset() * tensor.element_size()
            found[name] = TensorInfo(tuple(tensor.shape), tensor.dtype, path, offset)
    return found


def _of_this_byte_order(path: Path) -> bool:
    """Whether numbers lie in the file as this machine has them; files of old versions do not say, and torch takes it so."""
    with zipfile.ZipFile(path) as file:
        said = [file.read(name).decode() for name in file.namelist() if name.endswith("/byteorder")]
    return said in ([], [sys.byteorder])


class HeaderStore:
    """Tensors of which only names and shapes are at hand: a hub repository that has not been downloaded."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = infos

    def read(self, name: str) -> Tensor:
        """Not possible: the data is elsewhere."""
        raise InputError(f"{name}: its data has not been downloaded")

    def start(self, name: str, skip: int = 0) -> bytes | None:
        """None: the data is elsewhere."""
        return None


def _load_pickle(path: Path, mapped: bool = True) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and _is_zip(path))
    except pickle.UnpicklingError:
        raise InputError(
            f"{path}: holds more than tensors, and unpickling it could run code. Save its state dict as safetensors."
        ) from None
    except (RuntimeError, EOFError, ValueError, OSError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a PyTorch state dict, or damaged ({error}). Save it again.") from None
    for wrapper in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if isinstance(state, dict) and all(str(name).startswith("module.") for name in state):
        state = {name.removeprefix("module."): t for name, t in state.items()}  # saved from inside DataParallel
    if not isinstance(state, dict) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in state.items()):
        raise InputError(f"{path}: not a state dict (a dictionary of names and tensors). Save `model.state_dict()`.")
    return state


def _is_zip(path: Path) -> bool:
    """Whether the file is of torch's zip format; only that can be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


# A new kind of file is a class with the members of `Store`, and a line here.
_KINDS: dict[str, Callable[[list[Path]], Store]] = {
    ".safetensors": SafetensorsStore,
    ".pt": PickleStore,
    ".pth": PickleStore,
    ".bin": PickleStore,
    ".onnx": lambda paths: OnnxStore(paths[0]),
}
WEIGHTS = tuple(_KINDS)
"""The endings of files with weights."""


def open_file(path: Path) -> Store:
    """A store over one file with weights."""
    if path.suffix not in _KINDS:
        raise InputError(f"{path}: unsupported file type. Use a folder, .safetensors, .pt, .pth, .bin or .onnx.")
    return _KINDS[path.suffix]([path])


def open_folder(folder: Path, stem: str = "model", pickle_stem: str = "pytorch_model") -> Store:
    """A store over the weights of a Hugging Face folder."""
    files = weight_files(folder, stem, pickle_stem)
    return _KINDS[files[0].suffix](files)


def weight_files(folder: Path, stem: str = "model", pickle_stem: str = "pytorch_model") -> list[Path]:
    """The files that hold a folder's weights: safetensors before pickles and ONNX, whole before sharded.

    Raises:
        InputError: there are none, or some of them are missing.
    """
    for name in _whole_names(stem, pickle_stem):
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}{INDEX}").is_file():
            return _shards(folder, folder / f"{name}{INDEX}")
    raise InputError(
        f"{folder}: contains no weights; looked for {stem}.safetensors, {pickle_stem}.bin, their .index.json, and "
        f"{stem}.onnx."
    )


def _whole_names(stem: str, pickle_stem: str) -> tuple[str, ...]:
    return f"{stem}.safetensors", f"{pickle_stem}.bin", f"{stem}.onnx"


def weight_names(stem: str, pickle_stem: str) -> Iterator[str]:
    """What `weight_files` looks for: the files of weights that are not sharded, and the indexes of those that are."""
    for name in _whole_names(stem, pickle_stem):
        yield from (name, f"{name}{INDEX}")


def open_remote(address: str, folder: Path, files: Mapping[str, RemoteFile], stem: str = "model") -> Store:
    """A store over the safetensors of an address: a lone file, or those of a folder.

    Args:
        address: for messages.
        folder: where an index is, if there is one.
        files: the files by name.
        stem: the name of weights that are not sharded.

    Raises:
        InputError: there are none, or shards are missing.
    """
    whole, index = f"{stem}.safetensors", folder / f"{stem}.safetensors{INDEX}"
    if whole in files or not index.is_file():
        names = [whole] if whole in files else list(files)[: len(files) == 1]
    else:
        names = shard_names(index)
    missing = [name for name in names if name not in files]
    if missing or not names:
        raise InputError(f"{address}: weights are missing:{listing(missing or [whole])}\n  Copy the checkpoint again.")
    return SafetensorsStore([files[name] for name in names])


def _shards(folder: Path, index: Path) -> list[Path]:
    names = shard_names(index)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder}: shards are missing:{listing(missing)}\n  Download the checkpoint again.")
    return [folder / name for name in names]
