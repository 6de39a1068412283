"""Opens everything that a recipe names, collects every problem, and plans the merge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from massmerge.bundle.watched_files import SourceFiles
from massmerge.checkpoints import (
    PROCESSOR_FILES,
    Base,
    Expert,
    Source,
    find_source,
    is_adapter,
    narrow,
    open_base,
)
from massmerge.checkpoints.experts import task_model
from massmerge.checkpoints.open_clip import OpenClipStore
from massmerge.checkpoints.towers import has_towers, vision_tower
from massmerge.errors import InputError, Problem, problems_error
from massmerge.io.addresses import is_address
from massmerge.io.placement import Placement
from massmerge.io.remote_cache import path_of
from massmerge.io.untrusted import CONFIGS, refuse_code
from massmerge.merging.addressed_recipe import load_recipe
from massmerge.merging.from_bundle import Bundled
from massmerge.merging.heads import HeadSource, find_base_head
from massmerge.merging.heads.sources import named_files
from massmerge.merging.heads.text import TextTower
from massmerge.merging.open_tasks import Attempts, all_write, open_tasks, with_bundled, with_outputs
from massmerge.merging.plan import Plan, copies_base, plan_merge, touched_by
from massmerge.recipe import Recipe, TaskRecipe, TextHead
from massmerge.routing.sites import choose_sites, find_sites


@dataclass
class OpenedRecipe:
    """A plan with the opened sources that it was made from."""

    recipe: Recipe
    folder: Path
    base: Base
    experts: dict[str, Expert]
    heads: dict[str, HeadSource]
    processor: dict[str, Path]
    base_head: HeadSource | None
    """The base's language head, where a task has none of its own."""
    files: SourceFiles
    """All files that were opened."""
    bundled: Bundled | None = None
    """The bundle that base and some of the tasks are taken from."""
    further: dict[str, dict[str, HeadSource]] = field(default_factory=dict)
    """Further heads of each task, by name."""
    place: Placement = field(default_factory=Placement)
    """Where what is made of the sources is computed."""
    plan: Plan = field(init=False)

    @property
    def opened(self) -> list[TaskRecipe]:
        """The tasks whose own sources are opened: all that no bundle gives."""
        return tasks_besides(self.recipe, self.bundled)

    @property
    def copies_base(self) -> bool:
        """Whether what is written holds the base's weights, or says where they lie."""
        return copies_base(self.recipe, self.plan.sizes.base)


def tasks_besides(recipe: Recipe, bundled: Bundled | None) -> list[TaskRecipe]:
    """The tasks of a recipe that a bundle does not give."""
    return [task for task in recipe.tasks if bundled is None or task.name not in bundled.names]


def make_plan(recipe: Recipe | str | Path, folder: str | Path | None = None) -> Plan:
    """What a merge of this recipe would do; reads configurations, headers, and of weights which tensors experts change.

    Args:
        recipe: a recipe, or the path or address of one.
        folder: what relative paths in the recipe start from; the recipe's own folder if a path is given.

    Raises:
        InputError: the recipe cannot be read, or its base cannot be opened. Whatever else is wrong stands in
            `Plan.problems`.
    """
    return open_recipe(*recipe_and_folder(recipe, folder), download=False).plan


def recipe_and_folder(recipe: Recipe | str | Path, folder: str | Path | None) -> tuple[Recipe, Path]:
    """A recipe given as an object or as a path, with the folder that its own paths are relative to."""
    return (recipe, Path(folder or ".")) if isinstance(recipe, Recipe) else load_recipe(recipe, folder)


def open_recipe(
    recipe: Recipe,
    folder: Path,
    *,
    download: bool,
    workers: int = 2,
    bundled: Bundled | None = None,
    plan: Plan | None = None,
) -> OpenedRecipe:
    """Open every source of a recipe and plan its merge, collecting problems instead of stopping at the first.

    Args:
        recipe: what to merge.
        folder: what its relative paths start from.
        download: whether weights are fetched from a hub, or only headers.
        workers: how many tensors will be worked on at once.
        bundled: a bundle that gives the base and the tasks it names; sources of the other tasks alone are opened.
        plan: what another process has planned of the same sources, which saves looking which tensors experts change.
    """
    attempt, tasks = Attempts(), tasks_besides(recipe, bundled)
    files = bundled.files if bundled else SourceFiles()

    def find(who: str, text: str) -> Source:
        """The source that a path or name stands for; its files are watched from now on."""
        return files.watch(who, find_source(text, folder, download=download))

    _watch_named_files(tasks, folder, files, attempt)
    given = _expert_sources(tasks, find, attempt)
    base = attempt("base", bundled.open_base if bundled else lambda: open_base(find("base", recipe.base)))
    if base is None:
        raise problems_error(attempt.problems)
    tower = _text_tower(recipe, tasks, find, None if bundled else base, attempt)
    if bundled is None:
        base = _narrowed(base, [source for _, source in given], image=tower is not None)
    opened = open_tasks(given, base, folder, tower)
    if recipe.merge.static and all_write(base, tasks, opened):
        base, opened = with_outputs(base, opened, partial(open_tasks, given, folder=folder, tower=tower))
    attempt.problems += opened.problems
    if bundled is not None:
        opened = with_bundled(opened, bundled)
        attempt.problems += bundled.problems(recipe)
        processor, base_head = bundled.processor(), attempt("base", partial(bundled.base_head, opened.heads))
    else:
        found = attempt("processor", lambda: _processor_files(recipe, base.source, find))
        processor, base_head = found or {}, find_base_head(base, opened.heads.values())
    sources = OpenedRecipe(
        recipe, folder, base, opened.experts, opened.heads, processor, base_head, files, bundled, opened.further
    )
    sources.plan = _checked_plan(sources, attempt, workers) if plan is None else plan
    return sources


def _watch_named_files(tasks: list[TaskRecipe], folder: Path, files: SourceFiles, attempt: Attempts) -> None:
    """Watch the files that heads of the recipe name."""
    for task in tasks:
        for text in named_files([task]):
            if (path := attempt(f"task {task.name}", partial(path_of, text, folder))) is not None:
                files.add(f"task {task.name}", path)


def _expert_sources(
    tasks: list[TaskRecipe], find: Callable[[str, str], Source], attempt: Attempts
) -> list[tuple[TaskRecipe, Source]]:
    """Each task whose expert's source is found, with that source."""
    sources = [attempt(f"task {task.name}", partial(find, f"task {task.name}", task.expert)) for task in tasks]
    return [(task, source) for task, source in zip(tasks, sources, strict=True) if source is not None]


def _checked_plan(sources: OpenedRecipe, attempt: Attempts, workers: int) -> Plan:
    """The plan of a merge from these sources, with all that is wrong with recipe and sources."""
    recipe, bundled, heads = sources.recipe, sources.bundled, sources.heads
    attempt.problems += [*_label_problems(recipe, heads), *_headless_problems(recipe, heads, bundled)]
    kept = bundled.names if bundled and bundled.moments() else set()
    attempt.problems += _input_problems(recipe, sources.opened, sources.folder, kept)
    attempt.problems += _further_problems(recipe, heads)
    attempt("router.site", partial(_check_sites, recipe, sources.base))
    touched = {
        name: attempt(f"task {name} ({expert.source.text})", partial(touched_by, sources, expert)) or set()
        for name, expert in sources.experts.items()
    }
    return plan_merge(sources, touched, attempt.problems, workers)


def _text_tower(
    recipe: Recipe,
    tasks: list[TaskRecipe],
    find: Callable[[str, str], Source],
    base: Base | None,
    attempt: Attempts,
) -> TextTower | None:
    """The base's text tower, if a head is made of texts; its tokenizer is the processor's, else the base's.

    A bundle keeps the vision tower alone, so for its new tasks the base is opened where the recipe says.
    """
    if not any(isinstance(head, TextHead) for task in tasks for head in task.given_heads):
        return None
    if base is None:
        base = open_base(find("base", recipe.base))
    vision_tower(base)  # refuses a base that has no towers
    if recipe.processor is None:
        return TextTower(base, base.source)
    named = recipe.processor
    return TextTower(base, attempt("processor", partial(find, "processor", named)) or base.source)


def _narrowed(base: Base, sources: list[Source], *, image: bool) -> Base:
    """The part of the base that the experts are versions of; what does not fit is told when the expert is opened."""
    if has_towers(base) and (image or isinstance(base.store, OpenClipStore)):
        return narrow(base, vision_tower(base))
    for source in sources:
        if not is_adapter(source):
            try:
                return narrow(base, task_model(source, base).skeleton)
            except InputError:
                continue
    return base


def _processor_files(recipe: Recipe, base: Source, find: Callable[[str, str], Source]) -> dict[str, Path]:
    """The files of the tokenizer or image processor."""
    source = base if recipe.processor is None else find("processor", recipe.processor)
    files = {name: path for name in PROCESSOR_FILES if (path := source.file(name)) is not None}
    if recipe.processor is not None and not files:
        raise InputError(f"{recipe.processor}: contains no tokenizer or image processor.")
    for name, path in files.items():
        refuse_code(path.parent, (name,) if name in CONFIGS else ())
    return files


def _check_sites(recipe: Recipe, base: Base) -> None:
    """Refuse a site that the base does not have. Found by a forward pass of the skeleton, which some models cannot do."""
    if recipe.router.site == "auto" or recipe.merge.static:
        return
    try:
        sites = find_sites(base.skeleton.model.eval())
    except (RuntimeError, NotImplementedError):
        return
    choose_sites(sites, recipe.router.site)


def _input_problems(recipe: Recipe, tasks: list[TaskRecipe], folder: Path, kept: set[str]) -> Iterator[Problem]:
    """Inputs to calibrate with that are not there, and tasks without any."""
    given = [task for task in tasks if task.inputs is not None]
    for task in given:
        if is_address(str(task.inputs)):
            continue  # they are looked for when they are read
        if not path_of(str(task.inputs), folder).exists():
            yield Problem(f"task {task.name}", f"inputs: {task.inputs}: no such file or folder.")
    without = [task.name for task in recipe.tasks if task.inputs is None and task.name not in kept]
    if given and recipe.merge.static:
        yield Problem("inputs", f"{recipe.merge.method} does not route, so it takes no inputs. Remove `inputs:`.")
    elif given and without:
        yield Problem(
            "inputs",
            f"{', '.join(without)}: no `inputs:`. The router is calibrated only if every task has some; it is not.",
            "warning",
        )


def _label_problems(recipe: Recipe, heads: dict[str, HeadSource]) -> list[Problem]:
    """Shared labels that no task has."""
    known = {f"{task}/{label}" for task, head in heads.items() for label in head.labels or ()}
    complete = len(heads) == len(recipe.tasks)
    return [
        Problem("shared_labels", f"{name!r} is not a label of any task; write task/label.")
        for group in recipe.shared_labels
        for name in group
        if complete and name not in known
    ]


def _further_problems(recipe: Recipe, heads: dict[str, HeadSource]) -> Iterator[Problem]:
    """Further heads where there is none of the task's own, or where nothing would ask them."""
    for task in recipe.tasks:
        if task.heads and recipe.merge.static:
            yield Problem(f"task {task.name}", f"{recipe.merge.method} keeps one head per task. Remove `heads:`.")
        elif task.heads and task.name in heads and heads[task.name].labels is None:
            yield Problem(f"task {task.name}", "has further heads but none of its own. Give one of them as `head:`.")


def _headless_problems(recipe: Recipe, heads: dict[str, HeadSource], bundled: Bundled | None) -> Iterator[Problem]:
    """Tasks without labels beside tasks with them: inputs would be routed there, and get no answer."""
    without = [task for task, head in heads.items() if head.labels is None]
    before = {task.labels is None for task in bundled.tasks} if bundled else set()  # one that has both can be changed
    if 0 < len(without) < len(heads) and len(before) < 2 and not recipe.merge.static:
        text = "has no head that gives labels, and the other tasks answer with labels. Give its `head:` in the recipe"
        yield Problem(f"task {', '.join(without)}", f"{text}, or merge it into another bundle.")
