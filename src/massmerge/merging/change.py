"""Adds tasks to a bundle and removes tasks from it, without the experts of its other tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from massmerge.bundle.download import refuse_hub
from massmerge.bundle.merge_folder import recover
from massmerge.bundle.reader import Bundle
from massmerge.bundle.watched_files import SourceFiles
from massmerge.engines.choose import opened_engine
from massmerge.engines.job import Engine
from massmerge.errors import InputError
from massmerge.io import yaml_file as yamlfile
from massmerge.io.yaml_file import Section
from massmerge.merging.from_bundle import Bundled
from massmerge.merging.heads.text import template_sets
from massmerge.merging.open_recipe import OpenedRecipe, open_recipe
from massmerge.merging.run import Progress, carry_out, placement_for, workers_or_all
from massmerge.recipe import FileHead, Recipe, TaskRecipe, TextHead, names_differ


class Addition(Section):
    """What is added to a bundle: tasks as in a recipe, and the labels that they share with others."""

    tasks: Annotated[list[TaskRecipe], Field(min_length=1)]
    shared_labels: list[list[str]] = Field(default_factory=list)

    @classmethod
    def load(cls, path: str | Path) -> Addition:
        """Read it from a YAML file.

        Raises:
            InputError: it cannot be read; every fault is named with its line.
        """
        return yamlfile.parse(cls, yamlfile.read_text(Path(path), "file of tasks"), str(path), "file of tasks")

    @classmethod
    def of(cls, experts: Mapping[str, str | Path]) -> Addition:
        """Tasks that are given by their names and experts alone.

        Raises:
            InputError: none is given, or a name cannot be one.
        """
        if not isinstance(experts, Mapping):
            raise InputError("tasks to add are a mapping of names to experts, or the path of a YAML file.")
        missing = [name for name, expert in experts.items() if not str(expert)]
        if not experts or missing:
            raise InputError(f"{', '.join(missing) or 'no tasks given'}: give the name and the expert.")
        try:
            return cls(tasks=[TaskRecipe(name=str(name), expert=str(expert)) for name, expert in experts.items()])
        except ValidationError as error:
            raise InputError(
                "; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
            ) from None

    def with_inputs(self, paths: Mapping[str, str | Path], column: str | None = None) -> Addition:
        """The same with inputs of some of its tasks, for the router.

        Raises:
            InputError: there is no such task among them.
        """
        names = [task.name for task in self.tasks]
        unknown = [name for name in paths if name not in names]
        if unknown:
            raise InputError(f"inputs of {', '.join(unknown)}: not among the tasks that are added, {', '.join(names)}.")
        given = {name: {"inputs": str(path), "column": column} for name, path in paths.items()}
        return self.model_copy(update={"tasks": [t.model_copy(update=given.get(t.name, {})) for t in self.tasks]})

    @field_validator("tasks")
    @classmethod
    def _names_differ(cls, tasks: list[TaskRecipe]) -> list[TaskRecipe]:
        return names_differ(tasks)


def add(
    bundle: str | Path,
    tasks: Mapping[str, str | Path] | Addition | str | Path,
    *,
    out: str | Path | None = None,
    folder: str | Path | None = None,
    workers: int | None = None,
    engine: str | Engine | None = None,
    overwrite: bool = False,
    strict: bool = False,
    device: str = "auto",
    progress: Progress | None = None,
    planned: Callable[[OpenedRecipe], None] = lambda prepared: None,
) -> Path:
    """Add tasks to a bundle; the experts of its other tasks are not needed.

    Where ranks follow the number of tasks, as with a budget, those of the other tasks are cut: the best factors of a lower
    rank are the first of those that the bundle has. So the result is what a merge of all experts gives.

    Args:
        bundle: the bundle.
        tasks: names and experts, or the path of a YAML file with `tasks:` as in a recipe.
        out: the folder to write; the bundle is changed in place by default.
        folder: what relative paths start from; the YAML file's own folder, else the current one.
        workers: as in `merge`.
        engine: as in `merge`.
        overwrite: replace a bundle that is at `out`.
        strict: as in `merge`.
        device: as in `merge`.
        progress: as in `merge`.
        planned: as in `merge`.

    Returns:
        The folder that was written.

    Raises:
        InputError: bundle or tasks are wrong; nothing was written.
        MassError: the work failed.
    """
    place = placement_for(engine, device)
    with opened_engine(engine, workers) as chosen:
        prepared = prepare_addition(bundle, tasks, folder=folder, workers=workers_or_all(workers))
        prepared.place = place
        return carry_out(
            prepared, out, engine=chosen, overwrite=overwrite, strict=strict, progress=progress, planned=planned
        )


def remove(
    bundle: str | Path,
    tasks: str | Sequence[str],
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    engine: str | Engine | None = None,
    overwrite: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
    planned: Callable[[OpenedRecipe], None] = lambda prepared: None,
) -> Path:
    """Remove tasks from a bundle. The others stay as they are, to the byte; no expert is needed.

    Args:
        bundle: the bundle.
        tasks: the names of one or several of its tasks.
        out: as in `add`.
        workers: as in `merge`.
        engine: as in `merge`.
        overwrite: as in `add`.
        strict: as in `merge`.
        progress: as in `merge`.
        planned: as in `merge`.

    Returns:
        The folder that was written.

    Raises:
        InputError: there is no such bundle or task, or no task would be left; nothing was written.
        MassError: the work failed.
    """
    with opened_engine(engine, workers) as chosen:
        prepared = prepare_removal(bundle, tasks, workers=workers_or_all(workers))
        return carry_out(
            prepared, out, engine=chosen, overwrite=overwrite, strict=strict, progress=progress, planned=planned
        )


def prepare_addition(
    bundle: str | Path,
    tasks: Mapping[str, str | Path] | Addition | str | Path,
    *,
    folder: str | Path | None = None,
    workers: int = 2,
    download: bool = True,
) -> OpenedRecipe:
    """Open a bundle and the experts of new tasks, and plan; see `add`."""
    opened, files = _open(bundle)
    if isinstance(tasks, str | Path):
        folder = folder or Path(tasks).resolve().parent
        tasks = Addition.load(tasks)
    given = tasks if isinstance(tasks, Addition) else Addition.of(tasks)
    present = {task.name.lower(): task.name for task in opened.tasks}
    twice = [present[task.name.lower()] for task in given.tasks if task.name.lower() in present]
    if twice:
        raise InputError(
            f"{bundle}: has {', '.join(twice)} already. Choose another name, or remove it first: "
            f"`mass remove {bundle} {' '.join(twice)}`."
        )
    place = Path(folder or ".")
    new = given.tasks if _paths_start_here(opened.recipe, place) else [_anchored(t, place) for t in given.tasks]
    recipe = opened.recipe.model_copy(
        update={
            "tasks": [*opened.recipe.tasks, *new],
            "shared_labels": [*opened.recipe.shared_labels, *given.shared_labels],
        }
    )
    return open_recipe(recipe, place, download=download, workers=workers, bundled=Bundled(opened, files))


def _paths_start_here(recipe: Recipe, folder: Path) -> bool:
    """Whether this is the folder that the relative paths of a bundle's recipe start from, as far as one can tell."""
    named = [recipe.base, *(task.expert for task in recipe.tasks)]
    return any((folder / Path(text).expanduser()).exists() for text in named)


def _anchored(task: TaskRecipe, folder: Path) -> TaskRecipe:
    """A task whose relative paths are absolute: those of the other tasks start from another folder, and a bundle has one."""

    def found(value: object) -> object:
        """A path from the folder where something lies there, else what was given."""
        path = folder / Path(value).expanduser() if isinstance(value, str) and value else None
        return str(path.resolve()) if path is not None and path.exists() else value

    def anchored(head: FileHead | TextHead) -> FileHead | TextHead:
        """A head with absolute paths."""
        # The name of a set of templates is no path, whatever lies in the folder.
        return head.model_copy(update={k: v if str(v) in template_sets() else found(v) for k, v in head})

    update = {"expert": found(task.expert), "labels": found(task.labels), "inputs": found(task.inputs)}
    head = None if task.head is None else anchored(task.head)
    further = {name: anchored(one) for name, one in task.heads.items()}
    return task.model_copy(update={**update, "head": head, "heads": further})


def prepare_removal(bundle: str | Path, tasks: str | Sequence[str], *, workers: int = 2) -> OpenedRecipe:
    """Open a bundle and plan it without some of its tasks; see `remove`."""
    opened, files = _open(bundle)
    gone = {tasks} if isinstance(tasks, str) else set(map(str, tasks))
    names = [task.name for task in opened.tasks]
    unknown = sorted(gone - set(names))
    if unknown:
        raise InputError(f"{bundle}: no task {', '.join(unknown)}. Choose from {', '.join(names)}.")
    if not gone:
        raise InputError(f"no tasks given. Choose from {', '.join(names)}.")
    left = tuple(name for name in names if name not in gone)
    if not left:
        raise InputError(f"{bundle}: no task would be left. Delete the folder instead.")
    bundled = Bundled(opened, files, left)
    return open_recipe(_without(opened.recipe, gone), Path(), download=True, workers=workers, bundled=bundled)


def _without(recipe: Recipe, gone: set[str]) -> Recipe:
    """A recipe without some tasks; a label that was shared with theirs alone is shared no longer."""
    groups = [[n for n in group if n.partition("/")[0] not in gone] for group in _joined(recipe.shared_labels)]
    return recipe.model_copy(
        update={
            "tasks": [task for task in recipe.tasks if task.name not in gone],
            "shared_labels": [group for group in groups if len(group) > 1],
        }
    )


def _joined(groups: list[list[str]]) -> list[list[str]]:
    """Groups of labels with those put together that have one in common, for they mean the same as well."""
    joined: list[list[str]] = []
    for group in groups:
        meeting = [other for other in joined if set(other) & set(group)]
        joined = [other for other in joined if other not in meeting]
        joined.append(list(dict.fromkeys(name for part in (*meeting, group) for name in part)))
    return joined


def _open(bundle: str | Path) -> tuple[Bundle, SourceFiles]:
    """The bundle, whose every file is looked at: damage must not be carried over under new checksums."""
    refuse_hub(bundle)
    recover(Path(bundle))
    files = SourceFiles.of_bundle(Path(bundle))
    return Bundle(bundle), files
