"""The experts of a recipe's tasks with their heads: opened one by one, every problem collected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from massmerge.checkpoints import Base, Expert, FullExpert, Source, open_expert
from massmerge.checkpoints.backbone import language_class, with_output
from massmerge.checkpoints.differences import left_out
from massmerge.errors import InputError, Problem
from massmerge.merging.from_bundle import Bundled
from massmerge.merging.heads import HeadSource, find_further_heads, find_head
from massmerge.merging.heads.text import TextTower
from massmerge.recipe import TaskRecipe

_T = TypeVar("_T")


class Attempts:
    """Does things one by one and collects what is wrong with them, so that all problems are reported at once."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def __call__(self, where: str, action: Callable[[], _T]) -> _T | None:
        """What an action gives; nothing where it is refused, and the reason is kept under a name."""
        try:
            return action()
        except InputError as error:
            self.problems.append(Problem(where, str(error)))
            return None


@dataclass(frozen=True)
class OpenedTasks:
    """The experts of tasks whose sources were found, their heads, and what is wrong with them."""

    experts: dict[str, Expert]
    heads: dict[str, HeadSource]
    further: dict[str, dict[str, HeadSource]]
    problems: list[Problem]


def open_tasks(
    given: Iterable[tuple[TaskRecipe, Source]], base: Base, folder: Path, tower: TextTower | None
) -> OpenedTasks:
    """Open the experts and find their heads."""
    attempt, experts, heads = Attempts(), dict[str, Expert](), dict[str, HeadSource]()
    further: dict[str, dict[str, HeadSource]] = {}
    for task, source in given:
        where = f"task {task.name} ({task.expert})"
        expert = attempt(where, partial(open_expert, source, base))
        if expert is None:
            continue
        experts[task.name] = expert
        attempt.problems += [Problem(where, text, "warning") for text in expert.warnings]
        if isinstance(expert, FullExpert) and (rest := left_out(source, expert.beside, _head_layers(task))):
            attempt.problems.append(Problem(where, rest, "warning"))
        head = attempt(where, partial(find_head, task, expert, base, folder, tower))
        if head is not None:
            heads[task.name] = head
        further[task.name] = attempt(where, partial(find_further_heads, task, expert, base, folder, tower)) or {}
    return OpenedTasks(experts, heads, further, attempt.problems)


def _head_layers(task: TaskRecipe) -> list[str] | None:
    """The layers that a recipe names as a task's head; none where it names no head."""
    layers = getattr(task.head, "layers", None) or []
    return None if task.head is None else [layers] if isinstance(layers, str) else layers


def all_write(base: Base, tasks: list[TaskRecipe], opened: OpenedTasks) -> bool:
    """Whether all tasks answer with text: none has labels, and the base generates."""
    found = [opened.heads[task.name] for task in tasks if task.name in opened.heads]
    writes = language_class(base.skeleton.config) is not None
    return writes and len(found) == len(tasks) and all(head.labels is None for head in found)


def with_outputs(base: Base, opened: OpenedTasks, again: Callable[[Base], OpenedTasks]) -> tuple[Base, OpenedTasks]:
    """Base and experts with their output layers, which a static merge merges like every other matrix.

    As they were where neither the base nor an expert holds such a layer.
    """
    wide = with_output(base, own=any(head.kind == "shell" for head in opened.heads.values()))
    found = again(wide)
    held = wide.readings.keys() | {name for expert in found.experts.values() for name in expert.names()}
    return (wide, found) if held.issuperset(wide.output) else (base, opened)


def with_bundled(opened: OpenedTasks, bundled: Bundled) -> OpenedTasks:
    """The tasks that a bundle gives, then those that were opened."""
    return OpenedTasks(
        {**bundled.experts(), **opened.experts},
        {**bundled.heads(), **opened.heads},
        {**bundled.further(), **opened.further},
        opened.problems,
    )
