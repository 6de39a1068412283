"""One selected set as an ordinary checkpoint of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from massmerge.bundle import GENERATION_CONFIG
from massmerge.export.parts import Part
from massmerge.export.sets import (
    OpenBundle,
    bundle_output,
    model_output,
    random_inputs,
    relative_difference,
    set_model,
    write_labels,
)


def write_checkpoint(opened: OpenBundle, positions: tuple[int, ...], folder: Path) -> Part:
    """Write the model of a set, and compare what transformers loads again with the bundle."""
    task = sole_task(opened, positions)
    changes = opened.changes(positions)
    model = set_model(opened, changes, task)
    dtype = getattr(torch, opened.bundle.base_dtype)
    model.to(dtype).save_pretrained(folder)
    copy_processor(opened, folder)
    head = write_head_beside(opened, task, folder)
    inputs = random_inputs(opened.runtime.base)
    wanted = bundle_output(opened, changes, task, inputs)
    loaded = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    if getattr(model, "pooler", 0) is None:
        loaded.pooler = None  # neither the base nor the task has one
    difference = relative_difference(
        model_output(loaded, opened.runtime.base, inputs, logits=opened.answers(task)), wanted
    )
    return Part(set_name(opened, positions), ".", difference, head=head)


def sole_task(opened: OpenBundle, positions: tuple[int, ...]) -> str | None:
    """The task of a set of one, which alone can have its head in the model."""
    return opened.runtime.tasks[positions[0]] if len(positions) == 1 else None


def set_name(opened: OpenBundle, positions: tuple[int, ...]) -> str:
    """The names of a set's tasks."""
    return ", ".join(opened.runtime.tasks[i] for i in positions)


def write_head_beside(opened: OpenBundle, task: str | None, folder: Path) -> str:
    """Write labels, and a head that is no part of the model as a folder of its own; tells where the head is."""
    if task is None:
        return "none"
    write_labels(opened, task, folder)
    if opened.shell(task) is not None:
        return "inside"
    if opened.head_folder(task).is_dir():
        shutil.copytree(opened.head_folder(task), folder / "head")
        return "beside"
    return "none"


def copy_processor(opened: OpenBundle, folder: Path) -> None:
    """The tokenizer or image processor beside the model, and how the base generates."""
    for name in opened.bundle.manifest["files"]:
        if name.startswith("processor/"):
            shutil.copyfile(opened.bundle.path / name, folder / Path(name).name)
    generation = opened.bundle.path / "base" / GENERATION_CONFIG
    if generation.is_file():
        shutil.copyfile(generation, folder / GENERATION_CONFIG)
