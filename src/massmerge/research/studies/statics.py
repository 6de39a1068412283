"""Static merges in studies: made at scale 1, scaled by what validation rows say, answered once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from massmerge.errors import InputError
from massmerge.evaluation.metrics import Given
from massmerge.evaluation.scales import ScaleChoice, best_scale, mean_figure, rescaled_weights, with_scale
from massmerge.merging.open_recipe import open_recipe
from massmerge.merging.static.scales import candidates, published_scale
from massmerge.model.static import StaticModel
from massmerge.recipe import MergeOptions, Recipe
from massmerge.research.studies.compared import Answered, answers_of, scored
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.settings import Sample

SCALE_ROWS = 25  # of each task's validation rows, by which a scale is chosen


@dataclass(frozen=True)
class StaticRow:
    """A static merge with its answers and its scale."""

    answered: Answered
    scale: float | None
    """None of a method that has none."""
    chosen: bool
    """Whether the scale was chosen on validation rows, or is the published one."""


def subset(recipe: Recipe, tasks: Sequence[str]) -> Recipe:
    """The recipe of some of its tasks."""
    kept = [task for task in recipe.tasks if task.name in tasks]
    groups = [[name for name in group if name.partition("/")[0] in tasks] for group in recipe.shared_labels]
    return recipe.model_copy(update={"tasks": kept, "shared_labels": [group for group in groups if len(group) > 1]})


def static_recipe(recipe: Recipe, method: str, tasks: Sequence[str] | None = None) -> Recipe:
    """The recipe of a static merge of some of its tasks."""
    options = MergeOptions.model_validate({"method": method})
    chosen = recipe if tasks is None else subset(recipe, tasks)
    return chosen.model_copy(update={"merge": options})


class StaticMerge:
    """A static merge of some tasks, made when it is first needed and removed at the end: its answers are what is kept.

    Args:
        context: the study's.
        method: its name.
        tasks: which tasks are merged; all by default.
    """

    def __init__(self, context: StudyContext, method: str, tasks: Sequence[str] | None = None) -> None:
        self._context, self.method = context, method
        self.recipe = static_recipe(context.recipe, method, tasks)
        self.merged = [task.name for task in self.recipe.tasks]
        self.scaled = "scale" in self.recipe.merge.own()

    @cached_property
    def model(self) -> StaticModel:
        """The merge, at scale 1."""
        settings = self._context.settings
        merged = self._context.merged(with_scale(self.recipe, 1.0) if self.scaled else self.recipe)
        return StaticModel(merged, device=settings.device, dtype=settings.dtype)

    def set_scale(self, scale: float) -> None:
        """Give the model's weights another scale."""
        sources = open_recipe(self.recipe, self._context.recipe_folder, download=True)
        self.model.load_weights(rescaled_weights(sources, self.model.path)(scale))

    @cached_property
    def scale(self) -> tuple[float | None, bool]:
        """The scale, and whether validation rows chose it."""
        if not self.scaled:
            return None, False
        published = published_scale(self.method, len(self.merged), self.recipe.merge.own())
        if self._context.settings.quick:
            return published, False
        try:
            context = self._context.validated_by(SCALE_ROWS)
        except InputError:
            return published, False
        about = {"recipe": self.recipe.dump()}
        found = context.cell("scale", about, lambda: {"scale": self._choose(context).scale})
        return float(found["scale"]), True

    def _choose(self, context: StudyContext) -> ScaleChoice:
        samples = [sample for sample in context.samples if sample.task in self.merged]
        sources = open_recipe(self.recipe, self._context.recipe_folder, download=True)
        rescale = rescaled_weights(sources, self.model.path)

        def figure(scale: float) -> float:
            """The mean figure with the deltas scaled so."""
            self.model.load_weights(rescale(scale))
            return _given_figure(context, self.model, samples)

        return best_scale(candidates(self.method, self.recipe.merge.own()), figure, context.progress)

    def answers(self) -> StaticRow:
        """The answers to the samples of the merged tasks."""
        scale, chosen = self.scale
        tasks = [task for task in self._context.measured if task in self.merged]
        about = {"recipe": self.recipe.dump(), "scale": scale}
        found = answers_of(self._context, self.method, about, self.ready, tasks)
        self.remove()
        return StaticRow(found, scale, chosen)

    def ready(self) -> StaticModel:
        """The merge at its scale."""
        scale, _ = self.scale
        if scale is not None:
            self.set_scale(scale)
        return self.model

    def remove(self) -> None:
        """Take the merge from the disk, if it was made."""
        if "model" in self.__dict__:
            shutil.rmtree(self.model.path, ignore_errors=True)
            del self.__dict__["model"]


def _given_figure(context: StudyContext, model: StaticModel, samples: Sequence[Sample]) -> float:
    """The mean over the tasks of their metric on some samples, each answered by its own head."""
    order = sorted(samples, key=context.size)
    size = context.settings.batch_size
    found: dict[str, tuple[list[str], list[Given]]] = {}
    for at in range(0, len(order), size):
        chunk = order[at : at + size]
        inputs, tasks = [context.input(s) for s in chunk], [s.task for s in chunk]
        pairs = model.outcomes(inputs, tasks, batch_size=size, **context.generation)
        for sample, (_, given) in zip(chunk, pairs, strict=True):
            truths, answers = found.setdefault(sample.task, ([], []))
            truths.append(sample.label)
            answers.append(scored(context, given))
    return mean_figure(context.ready.suite, found)
