"""Exports a bundle to a folder that appears when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from massmerge.errors import InputError, MassError
from massmerge.export.checkpoint import write_checkpoint
from massmerge.export.layout import Adapters
from massmerge.export.onnx import write_onnx
from massmerge.export.parts import Exported, Part
from massmerge.export.peft import write_adapter
from massmerge.export.sets import TOLERANCE, OpenBundle

Form = Literal["peft", "hf", "onnx"]
FORMS: tuple[str, ...] = get_args(Form)
_OF_SETS = {"hf": write_checkpoint, "onnx": write_onnx}


def export_bundle(
    bundle: str | Path,
    target: str | Path,
    form: Form,
    tasks: Sequence[str] | None = None,
    *,
    adapters: Adapters = "together",
    progress: Callable[[str], None] = lambda name: None,
) -> Exported:
    """Write what a bundle knows in a form that other software reads, and compare its outputs with the bundle's.

    Args:
        bundle: the bundle's folder.
        target: the folder to write; it must not be there, or be empty.
        form: `peft` for an adapter of each task; `hf` for a checkpoint, `onnx` for an ONNX file of one set.
        tasks: which tasks to write as adapters, all by default; or the set, which must be given unless there is one task.
        adapters: for `peft`, see `massmerge.export.layout.make_layout`.
        progress: hears the name of each task.

    Raises:
        InputError: no such task, something in the way at the target, or a library that is missing.
        MassError: what was written does not give the bundle's outputs; nothing is left at the target.
    """
    place = Path(target)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(f"{target}: is there already. Choose another target, or remove it.")
    opened = OpenBundle.open(bundle)
    positions = opened.positions(tasks)
    if form != "peft" and tasks is None and len(positions) > 1:
        known = ", ".join(opened.runtime.tasks)
        raise InputError(f"--to {form} writes one set: name its tasks by --tasks. There are {known}.")
    with _appearing(place) as work:
        if form == "peft":
            work.mkdir()
            parts = []
            for position in positions:
                name = opened.runtime.tasks[position]
                progress(name)
                parts.append(write_adapter(opened, position, work / name, adapters))
        else:
            progress(form)
            parts = [_OF_SETS[form](opened, positions, work)]
        half = opened.bundle.base_dtype != "float32"
        for part in parts:
            _refuse_difference(part, half=half)
        sized = tuple(replace(part, nbytes=_bytes(work / part.path)) for part in parts)
    return Exported(str(target), form, sized)


def _refuse_difference(part: Part, *, half: bool) -> None:
    """Nothing that claims to be the same may differ; in half precision rounding alone makes a difference."""
    limit = 3e-2 if half else TOLERANCE
    if not part.left_out and not part.difference <= limit:
        raise MassError(
            f"{part.name}: its outputs differ from the bundle's by {part.difference:.1e} of the largest, more than "
            f"{limit:.0e}. Nothing was written. Please report the architecture; --to hf may do."
        )


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder beside the target that takes its place when all went well, and goes away when not."""
    target = target.absolute()
    work = target.parent / f".{target.name}.partial"
    shutil.rmtree(work, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield work
        _let_read(work)
        if target.exists():
            target.rmdir()
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _let_read(folder: Path) -> None:
    """Give files the permissions that new files have here: safetensors writes its own for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
