"""Everything that a study needs, opened and checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from massmerge.bundle.download import find_bundle
from massmerge.bundle.reader import Bundle
from massmerge.checkpoints.backbone import language_class
from massmerge.engines.job import Engine
from massmerge.errors import InputError, problems_error
from massmerge.evaluation.prepared import PreparedEvaluation, prepare_evaluation
from massmerge.evaluation.report import require_matplotlib
from massmerge.evaluation.run import Progress, silent
from massmerge.evaluation.suite import VALIDATION, Suite
from massmerge.merging.open_recipe import OpenedRecipe, open_recipe, recipe_and_folder
from massmerge.recipe import ProblemType, Recipe
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.settings import StudySettings
from massmerge.research.studies.study import Study

QUICK_LIMIT = 20


@dataclass(frozen=True)
class _Planned:
    """A bundle that has not been made: what a suite is compared with."""

    tasks: list[str]
    labels: dict[str, tuple[str, ...]]
    shared_labels: list[list[str]]
    takes_images: bool
    writes: bool
    problems: dict[str, ProblemType | None]


@dataclass(frozen=True)
class Opened:
    """A context, and the studies that can be run with it."""

    context: StudyContext
    studies: list[Study]
    left_out: dict[str, str]
    """By name why a study of several cannot be run."""


def open_studies(
    studies: Sequence[Study],
    suite: str | Path,
    out: Path,
    settings: StudySettings,
    *,
    bundle: str | Path | None = None,
    recipe: str | Path | None = None,
    engine: Engine | None = None,
    progress: Progress = silent,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Opened:
    """Check suite, bundle and recipe, then read the rows; without a bundle the recipe's is merged and kept.

    Args:
        studies: what will be run. One study that cannot be run is an error, one of several is left out.
        suite: the suite's path.
        out: the folder of results; what is not computed twice lies in its `cache`.
        settings: options of the studies.
        bundle: the bundle's folder.
        recipe: the recipe's path.
        engine: whose workers merge, and answer by sets.
        progress: wraps iterables whose items take time.
        tell: called with a sentence on what is being done.

    Raises:
        InputError: something is wrong or missing; nothing has been computed then.
    """
    require_matplotlib()
    Suite.load(suite)  # its own faults come first, whatever else is missing
    if bundle is None and recipe is None:
        raise InputError("a study needs a bundle or a recipe: --bundle out/ or --recipe recipe.yaml.")
    bundle = None if bundle is None else find_bundle(bundle)
    given = _own_recipe(bundle) if recipe is None else recipe_and_folder(recipe, None)
    limit = settings.limit or (QUICK_LIMIT if settings.quick else None)
    settings = StudySettings(**{**vars(settings), "limit": limit})
    target = _open_target(bundle, given)
    ready = prepare_evaluation(target, suite, split=settings.split, limit=limit, seed=settings.seed)
    other_rows, fault = _open_validation(target, suite, settings)
    runnable, left_out = _runnable(studies, with_recipe=given is not None, no_support=fault, writes=ready.writes)
    cache = out / "cache"
    context = StudyContext(
        ready, Path(bundle or cache), cache, settings, recipe=given, other_rows=other_rows, engine=engine,
        progress=progress, tell=tell,
    )  # fmt: skip
    if bundle is None:
        context.bundle = context.merged(context.recipe)
    context.read_inputs()
    return Opened(context, runnable, left_out)


def _own_recipe(bundle: str | Path | None) -> tuple[Recipe, Path] | None:
    """The bundle's own recipe, if base and experts are where it says, seen from the current folder."""
    if bundle is None:
        return None
    try:
        own = Bundle(bundle, check=False).recipe, Path()
        return None if open_recipe(*own, download=False).plan.errors else own
    except InputError:
        return None


def _open_target(bundle: str | Path | None, given: tuple[Recipe, Path] | None) -> Path | _Planned:
    """What the suite is compared with: the bundle, or what the recipe would make."""
    sources = None
    if given is not None:
        sources = open_recipe(*given, download=True)
        if sources.plan.errors:
            raise problems_error(sources.plan.errors)
    if bundle is None:
        assert sources is not None
        return _planned(sources)
    opened = Bundle(bundle, check=False)
    opened.refuse_damage(opened.damage(sums=False))
    if given is not None:
        theirs, ours = [task.name for task in given[0].tasks], [task.name for task in opened.tasks]
        if theirs != ours:
            raise InputError(
                f"{bundle}: its tasks ({', '.join(ours)}) are not those of the recipe ({', '.join(theirs)}). Give the "
                "recipe that it was made by, or leave --bundle out."
            )
    return Path(bundle)


def _planned(sources: OpenedRecipe) -> _Planned:
    labels = {name: tuple(head.labels) for name, head in sources.heads.items() if head.labels is not None}
    image = sources.base.skeleton.model.main_input_name == "pixel_values"
    writes = not labels and language_class(sources.base.skeleton.config) is not None
    problems = {name: sources.heads[name].problem_type for name in labels}
    names = [task.name for task in sources.recipe.tasks]
    return _Planned(names, labels, sources.recipe.shared_labels, image, writes, problems)


def _open_validation(
    target: Path | _Planned, suite: str | Path, settings: StudySettings
) -> tuple[Callable[[int | None], PreparedEvaluation] | None, str]:
    """What gives rows of the split `validation`, or why there is none."""

    def rows(limit: int | None) -> PreparedEvaluation:
        """Up to so many rows of each task."""
        return prepare_evaluation(target, suite, split=VALIDATION, limit=limit, seed=settings.seed)

    try:
        Suite.load(suite).refuse_measured_rows(settings.split)
        rows(1)
    except InputError as error:
        return None, str(error)
    return rows, ""


def _runnable(
    studies: Sequence[Study], *, with_recipe: bool, no_support: str, writes: bool
) -> tuple[list[Study], dict[str, str]]:
    """The studies that can be run, and why the others cannot."""
    left_out: dict[str, str] = {}
    for study in studies:
        if study.needs_recipe and not with_recipe:
            left_out[study.name] = "it reads the experts, which --recipe recipe.yaml names."
        elif study.not_for_texts and writes:
            left_out[study.name] = f"these models write their answers and have no heads; {study.not_for_texts}"
        elif study.needs_validation and no_support:
            left_out[study.name] = (
                f"it needs rows of the split {VALIDATION!r} beside those that are measured: {no_support}"
            )
    runnable = [study for study in studies if study.name not in left_out]
    if not runnable:
        raise InputError("\n".join(f"study {name}: {why}" for name, why in left_out.items()))
    return runnable, left_out
