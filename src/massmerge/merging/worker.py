"""Carries out the units of a merge: tensors into parts, parts into the large files of the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massmerge.bundle.manifest import file_entry
from massmerge.bundle.parts import Parts, tensor_key
from massmerge.checkpoints.expert_tensors import Kept
from massmerge.engines.unit import Unit
from massmerge.io.tensor_file import read_tensor
from massmerge.linalg.factors import Factors
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.merging.plan import TensorPlan
from massmerge.merging.static.write import write_checkpoint_file
from massmerge.merging.tensor_parts import TensorParts
from massmerge.merging.units import Combine, LookAt, MakeParts, MakeShare, WriteFile, share_key
from massmerge.merging.write import write_bundle_file


class MergeWorker:
    """A merge as one process has opened it.

    Args:
        prepared: recipe and sources.
        parts: where finished tensors go.
        result: the folder that will be the target.
    """

    def __init__(self, prepared: OpenedRecipe, parts: Parts, result: Path) -> None:
        self._prepared, self._parts, self._result = prepared, parts, result
        self.tensors = TensorParts(prepared)

    def carry_out(self, unit: Unit, before: Mapping[str, Any]) -> Any:
        """Do a unit; returns the names of the parts that it made by their keys, or of a file what the manifest says."""
        match unit.data:
            case MakeParts() as data:
                return self._make(data)
            case MakeShare() as data:
                return self._share(data)
            case Combine() as data:
                return self._combine(data, before)
            case LookAt() as data:
                return self._look(data)
            case WriteFile() as data:
                return self._write(data)
        raise AssertionError(f"{unit.key}: not a unit of a merge")

    def _make(self, data: MakeParts) -> dict[str, str]:
        if self.tensors.static is not None:
            self.tensors.static.know(data.found)
        made = {}
        for index in data.indices:
            part = self._prepared.files.settled(partial(self.tensors.part, self._tensor(index)))
            made[tensor_key(index)] = self._parts.put(tensor_key(index), part)
        return made

    def _share(self, data: MakeShare) -> dict[str, str]:
        tensor = self._tensor(data.index)

        def share() -> dict[str, Tensor]:
            """One task's factors of the tensor, as they are stored."""
            return _packed(
                self.tensors.originals.kept(tensor, data.task, partial(self.tensors.originals.base, tensor.name))
            )

        key = share_key(data.index, self.tensors.originals.tasks.index(data.task))
        return {data.task: self._parts.put(key, self._prepared.files.settled(share))}

    def _combine(self, data: Combine, before: Mapping[str, dict[str, str]]) -> dict[str, str]:
        names = dict(data.shares)
        for made in before.values():
            names |= made

        def kept(tensor: TensorPlan, task: str, base: Callable[[], Tensor]) -> Kept | None:
            """One task's factors, from the file that the share of work wrote."""
            share = Parts(self._parts.folder, "", {task: names[task]})
            return _unpacked(
                {name: read_tensor(info).to(self.tensors.originals.device) for name, info in share.header(task).items()}
            )

        part = self._prepared.files.settled(lambda: self.tensors.part(self._tensor(data.index), kept))
        return {tensor_key(data.index): self._parts.put(tensor_key(data.index), part)}

    def _look(self, data: LookAt) -> dict[str, str]:
        static = self.tensors.static
        assert static is not None, "only static merges look first"
        tensors = {index: self._tensor(index) for index in data.indices}
        seen = self._prepared.files.settled(lambda: static.figures(tensors, data.step, data.found))
        return {data.key: self._parts.put(data.key, seen)}

    def _write(self, data: WriteFile) -> dict[str, int | str]:
        """A file of the result; until it is whole it is a draft among the parts, where nobody takes it for one."""
        write = write_checkpoint_file if self._prepared.recipe.merge.static else write_bundle_file
        parts, draft = Parts(self._parts.folder, "", data.names), self._parts.draft()
        try:
            self._prepared.files.settled(lambda: write(self._prepared, parts, data.file, draft))
            entry = file_entry(draft, data.file.path.as_posix())
            draft.replace(self._result / data.file.path)
        finally:
            draft.unlink(missing_ok=True)
        return entry

    def _tensor(self, index: int) -> TensorPlan:
        return self._prepared.plan.tensors[index]


def _packed(kept: Kept | None) -> dict[str, Tensor]:
    """One task's factors as they are kept until those of all are there; an empty `s` where the delta is zero."""
    if kept is None:
        return {"s": torch.zeros(0)}
    about = torch.tensor([kept.norm, kept.energy], dtype=torch.float64)
    return {name: part.cpu() for name, part in kept.factors._asdict().items()} | {"about": about}


def _unpacked(part: Mapping[str, Tensor]) -> Kept | None:
    if "about" not in part:
        return None
    norm, energy = part["about"].tolist()
    return Kept(Factors(part["u"], part["s"], part["v"]), norm, energy)
