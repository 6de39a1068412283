"""What is made of a recipe's sources without a merge: the base, the reader of inputs and the heads, for other methods."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel

from massmerge.bundle.layout import PROCESSOR, head_folder, task_folder
from massmerge.errors import InputError, problems_error
from massmerge.io.placement import Placement
from massmerge.merging.heads import write_head
from massmerge.merging.open_recipe import OpenedRecipe, open_recipe
from massmerge.model.base import dense_base
from massmerge.model.core import Core
from massmerge.model.heads.classify import Head, load_head
from massmerge.model.inputs import InputReader
from massmerge.recipe import MergeOptions, Recipe


def open_sources(recipe: Recipe, folder: Path, device: str = "auto", dtype: str = "auto") -> OpenedRecipe:
    """The sources of a recipe as methods that are no bundle take them: those that write with their output layers.

    Args:
        recipe: the recipe.
        folder: what its relative paths start from.
        device: where methods run, as in `load`.
        dtype: the type that they run in, as in `load`.
    """
    options = MergeOptions.model_validate({"method": "average"})
    found = open_recipe(recipe.model_copy(update={"merge": options}), folder, download=True)
    found.place = Placement.choose(device, dtype, found.base.dtype)
    return found


def open_answering(prepared: OpenedRecipe, place: Placement | None = None) -> Core:
    """The base, reader and heads of a recipe's sources.

    Args:
        prepared: the sources.
        place: where the base runs; where the sources say by default.

    Raises:
        InputError: the plan has errors, or a task has no head.
    """
    if prepared.plan.errors:
        raise problems_error(prepared.plan.errors)
    without = [task.name for task in prepared.recipe.tasks if prepared.heads[task.name].labels is None]
    if without and not prepared.base.writes:
        raise InputError(f"{', '.join(without)}: no head, so there is no label to answer. Give `head:` in the recipe.")
    touched = {name for expert in prepared.experts.values() for name in expert.names()}
    base = dense_base(prepared.base, touched, place or prepared.place)
    tasks = [task.name for task in prepared.recipe.tasks]
    with TemporaryDirectory(prefix="mass-") as temporary:
        folder = Path(temporary)
        heads = {} if prepared.base.writes else {task: _head(prepared, task, folder, base) for task in tasks}
        reader = _reader(prepared, folder / PROCESSOR, base)
    labels = {task: prepared.heads[task].labels or () for task in heads}
    return Core(base, tasks, labels, heads, reader, prepared.recipe.shared_labels)


def _head(prepared: OpenedRecipe, task: str, folder: Path, base: PreTrainedModel) -> Head:
    """A head as a bundle would hold it, read from there."""
    home = task_folder(folder, task)
    home.mkdir(parents=True)
    write_head(home, prepared.heads[task])
    head = load_head(head_folder(home), base)
    assert head is not None, "a task with labels has a head"
    return head


def _reader(prepared: OpenedRecipe, folder: Path, base: PreTrainedModel) -> InputReader:
    folder.mkdir()
    for name, path in prepared.processor.items():
        shutil.copyfile(path, folder / name)
    reader = InputReader(folder, base.config, image=base.main_input_name == "pixel_values")
    with suppress(InputError):  # told when an input comes that needs it; ready tensors do not
        _ = reader.processor
    return reader
