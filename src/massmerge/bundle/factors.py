"""The tasks' factors and whole tensors, each fetched when it is first asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from massmerge.bundle.reader import Bundle
from massmerge.checkpoints.skeleton import Slot
from massmerge.errors import InputError, listing
from massmerge.io.tensor_file import TensorInfo, read_header, read_tensor
from massmerge.linalg.factors import Factors


class TaskTensors:
    """The tasks' factors and whole tensors, in float32.

    Args:
        bundle: the bundle.
        mapped: leave files on disk, so that a task that is never selected is hardly read and its memory is the file's;
            else they are read whole, and nothing that happens to them matters any more.
    """

    def __init__(self, bundle: Bundle, *, mapped: bool = True) -> None:
        self.names = [task.name for task in bundle.tasks]
        self._tasks = [_TensorFile(bundle.factors_file(task), mapped) for task in self.names]

    def to(self, device: torch.device) -> None:
        """Give all tensors on that device from now on."""
        for file in self._tasks:
            file.to(device)

    def factors(self, task: int, tensor: str) -> Factors | None:
        """A task's factors of a matrix."""
        found = self._tasks[task]
        if f"{tensor}.s" not in found.infos:
            return None
        return Factors(found[f"{tensor}.u"], found[f"{tensor}.s"], found[f"{tensor}.v"])

    def changes(self, task: int, tensor: str) -> bool:
        """Whether a task has factors of a matrix."""
        return f"{tensor}.s" in self._tasks[task].infos

    def whole(self, task: int, tensor: str) -> Tensor | None:
        """A task's own value of a tensor."""
        found = self._tasks[task]
        return found[tensor] if tensor in found.infos else None

    def touched(self) -> set[str]:
        """Tensors that at least one task changes."""
        return {re.sub(r"\.[usv]$", "", n) if self._is_factor(t.infos, n) else n for t in self._tasks for n in t.infos}

    def refuse_misfits(self, slots: Mapping[str, Slot]) -> None:
        """Refuse factors and whole tensors that the base has no place for.

        Raises:
            InputError: it lists them.
        """
        faults = [f"{task}: {fault}" for task, file in zip(self.names, self._tasks, strict=True)
                  for fault in _misfits(file.infos, slots)]  # fmt: skip
        if faults:
            raise InputError(f"the tasks' tensors do not fit the base:{listing(faults)}\n  Merge again.")

    @staticmethod
    def _is_factor(names: dict[str, TensorInfo], name: str) -> bool:
        return name[-2:] in (".u", ".s", ".v") and f"{name[:-2]}.s" in names


def _misfits(infos: Mapping[str, TensorInfo], slots: Mapping[str, Slot]) -> Iterator[str]:
    """Names of a task's tensors that have no place in the base, or another shape than it."""
    for name, info in infos.items():
        tensor, _, part = name.rpartition(".")
        if part in ("u", "s", "v") and f"{tensor}.s" in infos:
            matrix = slots[tensor].matrix if tensor in slots else None
            rank = infos[f"{tensor}.s"].shape
            wanted = None if matrix is None else {"u": (matrix[0], *rank), "s": rank[:1], "v": (*rank, matrix[1])}[part]
            if info.shape != wanted or not {f"{tensor}.u", f"{tensor}.v"} <= infos.keys():
                yield f"{name} {info.shape}"
        elif name not in slots or info.shape != slots[name].shape:
            yield f"{name} {info.shape}"


class _TensorFile:
    """The tensors of a file, by name."""

    def __init__(self, path: Path, mapped: bool) -> None:
        self.infos = read_header(path)
        size = path.stat().st_size
        if mapped:
            self._bytes = torch.from_file(str(path), size=size, dtype=torch.uint8)
        else:
            self._bytes = read_tensor(TensorInfo((size,), torch.uint8, path))
        self._device = torch.device("cpu")
        self._made: dict[str, Tensor] = {}

    def to(self, device: torch.device) -> None:
        if device != self._device:
            self._device, self._made = device, {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            tensor = self._stored(self.infos[name])
            self._made[name] = tensor.to(self._device, torch.float32 if tensor.is_floating_point() else tensor.dtype)
        return self._made[name]

    def _stored(self, info: TensorInfo) -> Tensor:
        data = self._bytes[info.offset : info.offset + info.nbytes]
        if info.offset % info.dtype.itemsize:  # behind an odd number of bytes there is no view
            data = data.clone()
        return data.view(info.dtype).view(info.shape)
