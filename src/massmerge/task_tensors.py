"""The tasks' factors and whole tensors in memory."""

from __future__ import annotations

import re

import torch
from safetensors.torch import load_file
from torch import Tensor

from massmerge.bundle import Bundle
from massmerge.linalg import Factors


class TaskTensors:
    """The tasks' factors and whole tensors, in float32."""

    def __init__(self, bundle: Bundle) -> None:
        self.names = [task.name for task in bundle.tasks]
        # The library maps the files, so that a set that is never selected is never read.
        self._tasks = [load_file(bundle.factors_file(task)) for task in self.names]
        for tensors in self._tasks:
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and tensor.dtype != torch.float32:
                    tensors[name] = tensor.float()

    def to(self, device: torch.device) -> None:
        """Move everything."""
        for tensors in self._tasks:
            for name, tensor in tensors.items():
                tensors[name] = tensor.to(device)

    def factors(self, task: int, tensor: str) -> Factors | None:
        """A task's factors of a matrix."""
        found = self._tasks[task]
        if f"{tensor}.s" not in found:
            return None
        return Factors(found[f"{tensor}.u"], found[f"{tensor}.s"], found[f"{tensor}.v"])

    def whole(self, task: int, tensor: str) -> Tensor | None:
        """A task's own value of a tensor."""
        return self._tasks[task].get(tensor)

    def touched(self) -> set[str]:
        """Tensors that at least one task changes."""
        return {re.sub(r"\.[usv]$", "", n) if self._is_factor(t, n) else n for t in self._tasks for n in t}

    @staticmethod
    def _is_factor(tensors: dict[str, Tensor], name: str) -> bool:
        return name[-2:] in (".u", ".s", ".v") and f"{name[:-2]}.s" in tensors
