"""Chooses the scale of a static merge on labelled data: every candidate with the true heads, the best mean wins."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from massmerge.checkpoints.stores import open_folder
from massmerge.errors import InputError, problems_error
from massmerge.evaluation.data import TaskData, read_suite
from massmerge.evaluation.metrics import Given, given_of, statistic, written
from massmerge.evaluation.run import Progress, silent
from massmerge.evaluation.suite import VALIDATION, Suite, suite_and_folder
from massmerge.io.tensor_file import read_tensor
from massmerge.merging.open_recipe import OpenedRecipe, open_recipe, recipe_and_folder
from massmerge.merging.run import merge
from massmerge.merging.static import STATIC_METHODS
from massmerge.merging.static.scales import candidates
from massmerge.model.static import StaticModel
from massmerge.recipe import Recipe

_PATIENCE = 3  # candidates in a row that are no better than the best, after which the search ends


@dataclass(frozen=True)
class ScaleChoice:
    """The scale that did best, and what each candidate gave."""

    scale: float
    figures: dict[float, float]
    """For each scale that was tried the mean over the tasks of their metric, with the true head."""

    def recipe(self, recipe: Recipe) -> Recipe:
        """A recipe with the scale."""
        return with_scale(recipe, self.scale)


def choose_scale(
    recipe: Recipe | str | Path,
    suite: Suite | str | Path,
    work: Path,
    *,
    folder: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress = silent,
) -> ScaleChoice:
    """Choose the scale of a static merge on the split `validation` of a suite.

    Args:
        recipe: a recipe with a static method whose scale is `auto`, or the path of one.
        suite: a suite, or the path of one; its paths are relative to its folder.
        work: folder for the unscaled merge; it is removed at the end.
        folder: what relative paths in the recipe start from; its own folder if a path is given.
        limit: at most this many rows per task, drawn by `seed`.
        seed: of that draw.
        workers: as in `merge`.
        device: where to compute, as in `merge` and `load`.
        dtype: the type in which candidates answer, as in `load`.
        progress: wraps the candidates.

    Raises:
        InputError: the recipe has no scale to choose, or the suite does not fit; nothing has been computed then.
    """
    recipe, folder = recipe_and_folder(recipe, folder)
    refuse_fixed_scale(recipe)
    prepared = open_recipe(recipe, folder, download=True)
    if prepared.plan.errors:
        raise problems_error(prepared.plan.errors)
    given, data = _validation_rows(prepared, suite, limit, seed)
    unit = merge(with_scale(recipe, 1.0), work, folder=folder, workers=workers, overwrite=work.exists(), device=device)
    model = StaticModel(unit, device=device, dtype=dtype)
    for one in data.values():
        one.read_inputs()
    rescale = rescaled_weights(prepared, unit)
    grid = candidates(recipe.merge.method, recipe.merge.own())

    def figure(scale: float) -> float:
        """The mean figure of the tasks with deltas scaled so."""
        model.load_weights(rescale(scale))
        return mean_figure(
            given,
            {
                task: (rows.labels, _answers_with_the_task(model, task, rows, given.generate))
                for task, rows in data.items()
            },
        )

    choice = best_scale(grid, figure, progress)
    shutil.rmtree(work, ignore_errors=True)
    return choice


def refuse_fixed_scale(recipe: Recipe) -> None:
    """Refuse a recipe whose scale cannot be chosen."""
    method, scale = recipe.merge.method, recipe.merge.scale
    if scale is None:
        raise InputError(f"--suite chooses the scale of a static merge, and {method} has none. Leave it out.")
    if scale != "auto":
        raise InputError(f"--suite chooses the scale, but the recipe gives it: {scale}. Write `scale: auto`.")


def with_scale(recipe: Recipe, scale: float) -> Recipe:
    """The recipe with a scale that is given."""
    return recipe.model_copy(update={"merge": recipe.merge.model_copy(update={"scale": scale})})


def best_scale(grid: Sequence[float], figure: Callable[[float], float], progress: Progress = silent) -> ScaleChoice:
    """The scale with the largest figure, the smaller of equals; the search ends when it gets no better."""
    figures: dict[float, float] = {}
    for scale in progress(grid, "choosing the scale", len(grid)):
        figures[scale] = figure(scale)
        best = max(figures, key=figures.__getitem__)
        behind = len(figures) - 1 - list(figures).index(best)
        if behind >= _PATIENCE and figures[scale] < figures[best]:
            break
    return ScaleChoice(max(figures, key=figures.__getitem__), figures)


def rescaled_weights(prepared: OpenedRecipe, unit: Path) -> Callable[[float], Mapping[str, Tensor]]:
    """A function from a scale to the merged weights, from a merge whose scale is 1: `base + scale · (merged - base)`."""
    matrices = STATIC_METHODS[prepared.plan.method].matrices
    infos = open_folder(unit).infos
    names = [
        t.name
        for t in prepared.plan.tensors
        if t.in_base and infos[t.name].dtype.is_floating_point and (t.matrix is not None or not matrices)
    ]

    def weights(scale: float) -> Mapping[str, Tensor]:
        """The base with the deltas scaled so."""
        found = {}
        for name in names:
            base = prepared.base.read(name).float()
            found[name] = base + scale * (read_tensor(infos[name]).float() - base)
        return found

    return weights


def _validation_rows(
    prepared: OpenedRecipe, suite: Suite | str | Path, limit: int | None, seed: int
) -> tuple[Suite, dict[str, TaskData]]:
    """The rows of the tasks that are merged and measured; a suite may have more tasks than the recipe."""
    given, start = suite_and_folder(suite)
    both = [task.name for task in prepared.recipe.tasks if task.name in given.tasks]
    if not both:
        raise InputError(f"the suite has none of the recipe's tasks; it has {', '.join(given.tasks)}.")
    chosen = given.only(both).fitting({task: head.problem_type for task, head in prepared.heads.items()})
    chosen.refuse_measured_rows(None)
    writes = prepared.base.writes
    labels = {task: head.labels for task, head in prepared.heads.items() if writes or head.labels is not None}
    image = prepared.base.skeleton.model.main_input_name == "pixel_values"
    return chosen, read_suite(chosen, start, labels, image=image, split=VALIDATION, limit=limit, seed=seed)


def mean_figure(suite: Suite, answers: Mapping[str, tuple[Sequence[str], Sequence[Given]]]) -> float:
    """The mean over the tasks of their own metric, from the true labels of each and what was answered."""
    found = []
    for task, (truths, given) in answers.items():
        about = suite.tasks[task]
        figure = statistic(about.metric, task, truths, given, {}, about.positive)
        found.append(figure(np.arange(len(truths))))
    return float(np.mean(found))


def _answers_with_the_task(model: StaticModel, task: str, rows: TaskData, generate: dict[str, Any]) -> list[Given]:
    """What a task's own head says to its rows, or what is written; nothing to those that cannot be read."""
    readable = [i for i in range(len(rows)) if not isinstance(rows.inputs[i], Exception)]
    order = sorted(readable, key=rows.inputs.size)
    given: list[Given] = [Given()] * len(rows)
    inputs = [rows.inputs[i] for i in order]
    if model.writes:
        for place, text in zip(order, model.generate(inputs, task=task, **generate), strict=True):
            given[place] = written(None, text.text)
        return given
    for place, answer in zip(order, model.predict(inputs, task=task, top=1), strict=True):
        given[place] = given_of(answer)
    return given
