"""The tasks' factors and whole tensors, each fetched when it is first asked for."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from massmerge.bundle import Bundle
from massmerge.linalg import Factors
from massmerge.tensorfile import TensorInfo, read_header, read_tensor


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

    @staticmethod
    def _is_factor(names: dict[str, TensorInfo], name: str) -> bool:
        return name[-2:] in (".u", ".s", ".v") and f"{name[:-2]}.s" in names


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
