"""The tasks' factors and whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from massmerge.bundle.encoding import PARTS, decode, part_shapes, rounding
from massmerge.checkpoints.skeleton import Slot
from massmerge.errors import InputError, listing
from massmerge.io.placement import Placement
from massmerge.io.tensor_file import TensorInfo, map_file, read_tensor, tensor_in
from massmerge.linalg.factors import Factors
from massmerge.routing.separation import routing_targets

if TYPE_CHECKING:
    from massmerge.bundle.reader import Bundle


class TaskFile:
    """The factors and whole tensors of one task.

    Args:
        infos: the tensors of its file.
        read: gives one of them; as it is stored, by default.

    Factors are decoded where they are stored in int8; other types are given as `read` gives them.
    """

    def __init__(self, infos: Mapping[str, TensorInfo], read: Callable[[TensorInfo], Tensor] = read_tensor) -> None:
        self.infos, self._read = infos, read

    def factors(self, tensor: str) -> Factors | None:
        """The factors of a matrix; none where the task leaves the base as it is."""
        return decode(self._parts(tensor)) if f"{tensor}.s" in self.infos else None

    def rounding(self, tensor: str) -> float:
        """How far the encoding may have moved a matrix's factors, as a share of their product."""
        return rounding(self._parts(tensor))

    def _parts(self, tensor: str) -> dict[str, Tensor]:
        names = {part: f"{tensor}.{part}" for part in PARTS}
        return {part: self._read(self.infos[name]) for part, name in names.items() if name in self.infos}

    def whole(self, tensor: str) -> Tensor | None:
        """The task's own value of a tensor without factors; none where it leaves the base as it is."""
        return self._read(self.infos[tensor]) if tensor in self.infos else None

    def names(self) -> set[str]:
        """The tensors that the task changes or adds."""
        return {self._factored(name) or name for name in self.infos}

    def misfits(self, slots: Mapping[str, Slot]) -> Iterator[str]:
        """Tensors that have no place in the base, or another shape than it."""
        for name, info in self.infos.items():
            tensor = self._factored(name)
            if tensor:
                fits = self._wanted(tensor, slots).get(name.rpartition(".")[2]) == (info.shape, info.dtype)
            else:
                fits = name in slots and info.shape == slots[name].shape
            if not fits:
                yield f"{name} {info.shape}"

    def _factored(self, name: str) -> str | None:
        """The matrix that a tensor of the file is a factor of."""
        tensor, _, part = name.rpartition(".")
        return tensor if part in PARTS and f"{tensor}.s" in self.infos else None

    def _wanted(self, tensor: str, slots: Mapping[str, Slot]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each factor by the base; none where there is no such matrix, or another factor is missing."""
        matrix = slots[tensor].matrix if tensor in slots else None
        said, vector = self.infos.get(f"{tensor}.u"), self.infos[f"{tensor}.s"]
        if matrix is None or said is None or len(vector.shape) != 1 or not vector.shape[0]:
            return {}
        wanted = part_shapes(matrix, vector.shape[0], said.dtype)
        return wanted if {f"{tensor}.{part}" for part in wanted} <= self.infos.keys() else {}


def refuse_misfits(tasks: Mapping[str, TaskFile], slots: Mapping[str, Slot]) -> None:
    """Refuse factors and whole tensors that the base has no place for.

    Raises:
        InputError: it lists them.
    """
    faults = [f"{name}: {fault}" for name, task in tasks.items() for fault in task.misfits(slots)]
    if faults:
        raise InputError(f"the tasks' tensors do not fit the base:{listing(faults)}\n  Merge again.")


def routing_rank(bundle: Bundle, width: int) -> int | None:
    """How many vectors of each task route activations of a width at most; an expert of several tasks counts once."""
    distinct = dict.fromkeys(routing_targets(bundle.similarity))
    return bundle.recipe.routing_rank(width, [bundle.tasks[task].form for task in distinct])


class TaskTensors:
    """The tasks' factors and whole tensors where a model computes with them, each fetched when it is first asked for.

    Args:
        bundle: the bundle.
        place: where that is.
        mapped: leave files on disk, so that a task that is never selected is hardly read and its memory is the file's;
            else they are read whole, and nothing that happens to them matters any more.

    Attributes:
        names: of the tasks.
        forms: of their experts, `full` or `adapter`.
        targets: for each task the first one with the same expert.
    """

    def __init__(self, bundle: Bundle, place: Placement, *, mapped: bool = True) -> None:
        self.names = [task.name for task in bundle.tasks]
        self.forms = [task.form for task in bundle.tasks]
        self.targets = routing_targets(bundle.similarity)
        self.routing_rank = partial(routing_rank, bundle)
        self._place = place
        self._tasks = [TaskFile(bundle.headers[n], _Fetched(bundle.factors_file(n), mapped)) for n in self.names]
        self._factors: dict[tuple[int, str], Factors | None] = {}
        self._whole: dict[tuple[int, str], Tensor | None] = {}

    def factors(self, task: int, tensor: str) -> Factors | None:
        """A task's factors of a matrix; every set that has the task shares them. Singular values are float32."""
        if (task, tensor) not in self._factors:
            found = self._tasks[task].factors(tensor)
            self._factors[task, tensor] = None if found is None else self._placed(found)
        return self._factors[task, tensor]

    def _placed(self, found: Factors) -> Factors:
        put = self._place.put
        return Factors(put(found.u), found.s.to(self._place.device, torch.float32), put(found.v))

    def exact(self, task: int, tensor: str) -> Factors | None:
        """The same in float32 on the CPU, whatever a model computes in: for what is decided by them."""
        if self._place == Placement():
            return self.factors(task, tensor)
        found = self._tasks[task].factors(tensor)
        return None if found is None else Factors(*(part.float() for part in found))

    def changes(self, task: int, tensor: str) -> bool:
        """Whether a task has factors of a matrix."""
        return f"{tensor}.s" in self._tasks[task].infos

    def whole(self, task: int, tensor: str) -> Tensor | None:
        """A task's own value of a tensor."""
        if (task, tensor) not in self._whole:
            found = self._tasks[task].whole(tensor)
            self._whole[task, tensor] = None if found is None else self._place.put(found)
        return self._whole[task, tensor]

    def touched(self) -> set[str]:
        """Tensors that at least one task changes."""
        return {name for task in self._tasks for name in task.names()}

    def refuse_misfits(self, slots: Mapping[str, Slot]) -> None:
        """As the function of that name."""
        refuse_misfits(dict(zip(self.names, self._tasks, strict=True)), slots)


class _Fetched:
    """Gives the tensors of a file as they are stored."""

    def __init__(self, path: Path, mapped: bool) -> None:
        whole = TensorInfo((path.stat().st_size,), torch.uint8, path)
        self._bytes = map_file(path) if mapped else read_tensor(whole)

    def __call__(self, info: TensorInfo) -> Tensor:
        return tensor_in(self._bytes, info)
