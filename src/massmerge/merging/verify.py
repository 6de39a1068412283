"""Proof that a bundle is what its manifest says, and that its factors are those of the original experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massmerge.bundle.fitting import fitting_skeleton
from massmerge.bundle.reader import Bundle
from massmerge.bundle.watched_files import SourceFiles
from massmerge.checkpoints.expert_tensors import difference
from massmerge.checkpoints.skeleton import Kind
from massmerge.errors import InputError, problems_error
from massmerge.io.placement import Placement
from massmerge.linalg.factors import Factors, remaining_energy
from massmerge.merging.from_bundle import Bundled
from massmerge.merging.open_recipe import OpenedRecipe, open_recipe

# How far factors may be from the best ones of their rank, by their dtype, as a share of the delta. Float32 could do with
# less, but for the energy kept that the merge recorded: rounded to 1e-7, it leaves a root of that in doubt.
_TOLERANCE = {torch.float64: 3e-3, torch.float32: 3e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_WORST = 5


@dataclass(frozen=True)
class TensorError:
    """How far one reconstructed delta is from the expert's."""

    tensor: str
    error: float
    """‖kept − delta‖ / ‖delta‖."""
    promised: float
    """The same by the energy that the merge recorded: what the rank alone costs."""
    tolerance: float

    @property
    def fault(self) -> bool:
        """Whether the factors are worse than their rank explains.

        What the rank costs and what is wrong with the factors stand at a right angle. A difference of the two errors would
        hide the second behind a large first.
        """
        return not self.error**2 <= self.promised**2 + self.tolerance**2


@dataclass(frozen=True)
class TaskVerification:
    """One task against its original expert."""

    task: str
    expert: str
    error: float
    """Relative error of all deltas together."""
    worst: tuple[TensorError, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Verification:
    """What `mass verify` found."""

    path: str
    files: int
    damage: tuple[str, ...]
    tasks: tuple[TaskVerification, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is off."""
        return not self.damage and not any(task.faults for task in self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return {**asdict(self), "ok": self.ok}


def verify_bundle(
    bundle: str | Path,
    *,
    experts: bool = False,
    folder: str | Path | None = None,
    device: str = "auto",
    progress: Callable[[str], None] = lambda name: None,
) -> Verification:
    """Check every checksum, and with `experts` every delta against the original expert.

    Args:
        bundle: the bundle's folder.
        experts: whether to read the experts that the bundle's recipe names.
        folder: what the recipe's relative paths start from; the current folder by default.
        device: where deltas are compared, as in `merge`.
        progress: called with the name of each file and tensor.

    Raises:
        InputError: not a bundle, or one that no merge writes though its checksums are right; or an expert cannot be opened.
    """
    opened = Bundle(bundle, check=False)
    files = len(opened.manifest["files"])
    damage = tuple(opened.damage(progress))
    if not damage:
        fitting_skeleton(opened)  # checksums alone tell nothing of who wrote the files
    if damage or not experts:
        return Verification(str(bundle), files, damage)
    prepared = _prepare(opened, Path(folder or "."))
    prepared.place = Placement.exact(device)
    tasks = tuple(_verify_task(opened, prepared, i, progress) for i in range(len(opened.tasks)))
    return Verification(str(bundle), files, damage, tasks)


def _prepare(bundle: Bundle, folder: Path) -> OpenedRecipe:
    try:
        prepared = open_recipe(bundle.recipe, folder, download=True)
        if prepared.plan.errors:
            raise problems_error(prepared.plan.errors)
    except InputError as error:
        hint = f"Relative paths of the recipe start at {folder.resolve()}; use --folder to change that."
        raise InputError(f"{error}\n{hint}") from None
    return prepared


def _verify_task(
    bundle: Bundle, prepared: OpenedRecipe, position: int, progress: Callable[[str], None]
) -> TaskVerification:
    task = bundle.tasks[position]
    errors: list[TensorError] = []
    faults: list[str] = []
    squared_error = squared = 0.0
    rows = {name: row for row, name in enumerate(bundle.ranks)}
    for tensor in prepared.plan.tensors:
        if not tensor.ranks[position]:
            continue
        progress(f"{task.name}: {tensor.name}")
        base = prepared.base.read(tensor.name) if tensor.in_base else torch.zeros(tensor.shape)
        given = prepared.experts[task.name].read(tensor.name)
        if tensor.name not in rows:
            own = given.value(base, prepared.base.skeleton.slots[tensor.name])
            if not _whole_agrees(bundle.whole(task.name, tensor.name), base, own, tensor.kind):
                faults.append(f"{tensor.name}: not the expert's value")
            continue
        device = prepared.place.device
        change = given.to(device).matrix(base.to(device), tensor.kind)
        length = float(change.double().norm())
        factors = bundle.factors(task.name, tensor.name)
        if factors is None:
            if length > 0:
                faults.append(f"{tensor.name}: the expert changes it, the bundle does not")
            continue
        stored = Factors(*(part.to(device, torch.float32) for part in factors))
        difference = math.sqrt(remaining_energy(change, stored))
        promised = math.sqrt(max(0.0, 1.0 - float(bundle.statistics["energy"][rows[tensor.name], position])))
        tolerance = _TOLERANCE[factors.u.dtype] + bundle.task_file(task.name).rounding(tensor.name)
        found = TensorError(tensor.name, difference / length if length else math.inf, promised, tolerance)
        errors.append(found)
        squared_error, squared = squared_error + difference**2, squared + length**2
        if found.fault:
            faults.append(f"{tensor.name}: relative error {found.error:.2e}, its rank explains {found.promised:.2e}")
    changed = {tensor.name for tensor in prepared.plan.tensors if tensor.ranks[position]}
    held = Bundled(bundle, SourceFiles()).experts()[task.name].names()
    faults += [f"{name}: the bundle changes it, the expert does not" for name in sorted(held - changed)]
    worst = tuple(sorted(errors, key=lambda e: -e.error)[:_WORST])
    total = math.sqrt(squared_error / squared) if squared else 0.0
    return TaskVerification(task.name, prepared.experts[task.name].source.text, total, worst, tuple(faults))


def _whole_agrees(stored: Tensor | None, base: Tensor, given: Tensor, kind: Kind) -> bool:
    """Whether the bundle has the expert's value, or rightly none where the expert left the base alone.

    A small matrix may have been put together from its factors when a task was added, so it is the expert's up to rounding.
    """
    change = difference(base, given)
    if stored is None:
        return not bool(change.any())
    own = given.to(stored.dtype)
    if kind == "other" or torch.equal(stored, own):
        return bool(torch.equal(stored, own))
    rounding = torch.finfo(stored.dtype).eps * float(own.double().norm())
    allowed = _TOLERANCE[stored.dtype] * float(change.double().norm()) + rounding
    return float((stored.double() - own.double()).norm()) <= allowed
