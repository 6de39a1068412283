"""One selected set as an ordinary checkpoint of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from massmerge.bundle.layout import head_folder
from massmerge.checkpoints.pretrained import pretrained_model
from massmerge.io.untrusted import GENERATION_CONFIG
from massmerge.model.export.parts import Part
from massmerge.model.export.sets import (
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
    tasks = task_names(opened, positions)
    changes, around = opened.changes(positions), opened.around(tasks)
    model = set_model(opened, changes, around)
    dtype = getattr(torch, opened.bundle.base_dtype)
    model.to(dtype).save_pretrained(folder)
    copy_processor(opened, folder)
    head = "inside" if around else write_head_beside(opened, tasks, folder)
    write_labels(opened, tasks, folder)
    inputs = random_inputs(opened.model.core.base)
    logits = around is not None
    wanted = bundle_output(opened, changes, tasks, inputs, logits=logits)
    loaded = pretrained_model(type(model), folder)
    if getattr(model, "pooler", 0) is None:
        loaded.pooler = None  # neither the base nor the task has one
    difference = relative_difference(model_output(loaded, opened.model.core.base, inputs, logits=logits), wanted)
    return Part(", ".join(tasks), ".", difference, head=head)


def task_names(opened: OpenBundle, positions: tuple[int, ...]) -> list[str]:
    """The names of a set's tasks."""
    return [opened.model.tasks[i] for i in positions]


def write_head_beside(opened: OpenBundle, tasks: list[str], folder: Path) -> str:
    """Copy the head of a set of one task, where it is no part of the model, to a folder of its own; tells where it is."""
    if len(tasks) > 1 or not opened.head_folder(tasks[0]).is_dir():
        return "none"
    shutil.copytree(opened.head_folder(tasks[0]), head_folder(folder))
    return "beside"


def copy_processor(opened: OpenBundle, folder: Path) -> None:
    """The tokenizer or image processor beside the model, and how the base generates."""
    for name, path in opened.bundle.processor_files().items():
        shutil.copyfile(path, folder / name)
    generation = opened.bundle.base_folder / GENERATION_CONFIG
    if generation.is_file():
        shutil.copyfile(generation, folder / GENERATION_CONFIG)
