"""An evaluation before anything is run: which rows, which labels, and everything that is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from massmerge.bundle.download import find_bundle
from massmerge.bundle.manifest import read_manifest
from massmerge.bundle.reader import Bundle
from massmerge.errors import InputError
from massmerge.evaluation.data import TaskData, read_suite
from massmerge.evaluation.metrics import plain_text
from massmerge.evaluation.suite import Suite, suite_and_folder
from massmerge.model.static import StaticFolder
from massmerge.recipe import ProblemType


class Measurable(Protocol):
    """What a suite is compared with: a loaded model, or something that tells as much of one."""

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        ...

    @property
    def labels(self) -> Mapping[str, tuple[str, ...]]:
        """Label names of each task that has a head."""
        ...

    @property
    def problems(self) -> Mapping[str, ProblemType | None]:
        """What the outputs of each task's head mean."""
        ...

    @property
    def shared_labels(self) -> list[list[str]]:
        """Groups of `task/label` that mean the same thing."""
        ...

    @property
    def takes_images(self) -> bool:
        """Whether inputs are images."""
        ...


@dataclass(frozen=True)
class PreparedEvaluation:
    """An evaluation before anything is run: the bundle's labels and the chosen rows of every task."""

    suite: Suite
    bundle: Bundle | None
    tasks: list[str]
    """Of the bundle."""
    labels: Mapping[str, tuple[str, ...]]
    shared: list[list[str]]
    """Groups of labels of several of the bundle's tasks that mean the same, of its recipe and of the suite."""
    data: dict[str, TaskData]
    notes: list[str]
    writes: bool = False
    """Whether the bundle answers with text."""
    static: StaticFolder | None = None
    """What is measured, where that is a static merge and no bundle."""

    @property
    def counts(self) -> dict[str, int]:
        """How many rows of each task are measured."""
        return {task: len(data) for task, data in self.data.items()}


def prepare_evaluation(
    bundle: str | Path | Measurable,
    suite: str | Path | Suite,
    *,
    folder: str | Path | None = None,
    tasks: Sequence[str] | None = None,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> PreparedEvaluation:
    """Find the rows that an evaluation would run, and refuse what is wrong with them; see `evaluate`."""
    if limit is not None and limit < 1:
        raise InputError("limit must be at least 1.")
    if seed < 0:
        raise InputError("seed must be at least 0.")
    given, start = suite_and_folder(suite, folder)
    opened = static = None
    if isinstance(bundle, str | Path):
        bundle = find_bundle(bundle)
        if read_manifest(bundle).get("method") != "mass":
            bundle = static = StaticFolder(bundle)
    if isinstance(bundle, str | Path):
        opened = Bundle(bundle, check=False)
        names = [task.name for task in opened.tasks]
        labels: Mapping[str, tuple[str, ...]] = {t.name: t.labels for t in opened.tasks if t.labels is not None}
        problems = {task.name: task.problem_type for task in opened.tasks}
        image, declared, writes = opened.takes_images, opened.recipe.shared_labels, opened.writes
    else:
        names, labels = bundle.tasks, bundle.labels
        image, declared, problems = bundle.takes_images, bundle.shared_labels, {**bundle.problems}
        writes = getattr(bundle, "writes", False)  # what only predicts never writes
    groups = [*declared, *_checked_groups(given, labels)]
    if writes:
        groups = [[_plain_label(name) for name in group] for group in groups]
    known: dict[str, tuple[str, ...] | None] = dict.fromkeys(names) if writes else {**labels}
    shared = [group for group in groups if len({name.partition("/")[0] for name in group} & known.keys()) > 1]
    chosen = given.only(list(tasks or ())).fitting(problems)
    data = read_suite(chosen, start, known, image=image, split=split, limit=limit, seed=seed)
    notes = []
    unmeasured = [name for name in names if name not in data]
    if unmeasured:
        notes.append(f"not measured, though inputs may be routed there: {', '.join(unmeasured)}.")
    return PreparedEvaluation(chosen, opened, names, labels, shared, data, notes, writes, static)


def _plain_label(name: str) -> str:
    """A `task/label` whose label is a text that is written."""
    task, _, label = name.partition("/")
    return f"{task}/{plain_text(label)}"


def _checked_groups(suite: Suite, labels: Mapping[str, tuple[str, ...]]) -> list[list[str]]:
    """The suite's shared labels; a label that its task does not have is a mistake that would cost points in silence."""
    wrong = []
    for name in (name for group in suite.shared_labels for name in group):
        task, _, label = name.partition("/")
        if task not in suite.tasks and task not in labels:
            wrong.append(f"{name!r}: neither the suite nor the bundle has a task {task!r}")
        elif task in labels and label not in labels[task]:
            wrong.append(f"{name!r}: the labels of {task} are {', '.join(labels[task][:30])}")
    if wrong:
        raise InputError("shared_labels of the suite: " + "\n  ".join(wrong))
    return suite.shared_labels
