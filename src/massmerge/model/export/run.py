"""Exports a bundle to a folder that appears when it is complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from massmerge.bundle.download import find_bundle
from massmerge.bundle.merge_folder import recover
from massmerge.bundle.watched_files import SourceFiles
from massmerge.bundle.work_folder import WorkFolder
from massmerge.errors import InputError, MassError
from massmerge.model.export.checkpoint import write_checkpoint
from massmerge.model.export.layout import Adapters
from massmerge.model.export.onnx import write_onnx
from massmerge.model.export.parts import Exported, Part
from massmerge.model.export.peft import write_adapter
from massmerge.model.export.sets import TOLERANCE, OpenBundle

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
        adapters: for `peft`, see `massmerge.model.export.layout.make_layout`.
        progress: hears the name of each task.

    Raises:
        InputError: no such task, something in the way at the target, or a library that is missing.
        MassError: what was written does not give the bundle's outputs; nothing is left at the target.
    """
    place = Path(target)
    recover(place)  # a bundle that a killed command has moved aside is not gone
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InputError(f"{target}: is there already. Choose another target, or remove it.")
    files = SourceFiles.of_bundle(find_bundle(bundle))
    opened = OpenBundle.open(bundle)
    positions = opened.positions(tasks)
    if form != "peft" and tasks is None and len(positions) > 1:
        known = ", ".join(opened.model.tasks)
        raise InputError(f"--to {form} writes one set: name its tasks by --tasks. Choose from {known}.")
    work = WorkFolder(place, "export")

    def write() -> list[Part]:
        """Write the result into the work folder, a part for each of its folders."""
        if form != "peft":
            progress(form)
            return [_OF_SETS[form](opened, positions, work.fresh_result())]
        return list(_adapters(opened, positions, work.fresh_result(), adapters, progress))

    with work.held():
        try:
            parts = files.settled(write)
            for part in parts:
                _refuse_difference(part, half=opened.bundle.base_dtype != "float32")
            _let_read(work.result)
            sized = tuple(replace(part, nbytes=_bytes(work.result / part.path)) for part in parts)
            work.publish(replacing=False)
        finally:
            work.discard()
    return Exported(str(target), form, sized)


def _adapters(
    opened: OpenBundle,
    positions: Sequence[int],
    folder: Path,
    adapters: Adapters,
    progress: Callable[[str], None],
) -> Iterator[Part]:
    """An adapter of each task, in a folder of its name."""
    for position in positions:
        name = opened.model.tasks[position]
        progress(name)
        yield write_adapter(opened, position, folder / name, adapters)


def _refuse_difference(part: Part, *, half: bool) -> None:
    """Nothing that claims to be the same may differ; in half precision rounding alone makes a difference."""
    limit = 3e-2 if half else TOLERANCE
    if not part.left_out and not part.difference <= limit:
        raise MassError(
            f"{part.name}: its outputs differ from the bundle's by {part.difference:.1e} of the largest, more than "
            f"{limit:.0e}. Nothing was written. Please report the architecture; --to hf may do."
        )


def _let_read(folder: Path) -> None:
    """Give files the permissions that new files have here: safetensors writes its own for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
