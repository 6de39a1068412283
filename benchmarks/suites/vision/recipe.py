"""Recipes and suite files of the vision suite, written beside its base, experts and data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suites.fetch import cache_root
from benchmarks.suites.recipes import Metrics, read_metrics, suite_tasks, write_pair
from benchmarks.suites.vision.tasks import ALIKE, CORE, DIGITS, SCRIPTS, TASKS, WIDE, WIDE14

DIGIT_TASKS = ("mnist", "usps", "digits")
SETS: dict[str, tuple[str, ...]] = {
    "core": tuple(CORE),
    "wide": WIDE14,
    "wide20": WIDE,
    "alike": ALIKE,
    "scripts": SCRIPTS,
    "all": tuple(TASKS),
}


def kind_of(name: str, task: str) -> str:
    """What a task's expert is in a set: all image experts are full fine-tunes."""
    return "full"


def write_files(name: str, tasks: Sequence[str], folder: Path | None = None) -> tuple[Path, Path]:
    """Write `recipe-NAME.yaml` and `suite-NAME.yaml` for some tasks; paths inside are relative to them.

    Args:
        name: what the two files are called after.
        tasks: names of the tasks, in the recipe's order. Each must have its expert.
        folder: where base, experts and data lie; the vision suite's part of the cache if not given.

    Returns:
        The paths of the recipe and of the suite.
    """
    folder = folder or cache_root() / "vision"
    metrics = read_metrics(folder / "experts", tasks)
    return write_pair(folder, name, recipe(tasks), suite(name, metrics))


def recipe(tasks: Sequence[str]) -> dict[str, Any]:
    """A recipe with defaults only, so that what is measured is what a user gets."""
    return {
        "base": "base",
        "tasks": [{"name": task, "expert": f"experts/{task}"} for task in tasks],
        **_shared(tasks),
    }


def suite(name: str, metrics: Metrics) -> dict[str, Any]:
    """The suite: each task's data, and as reference what its expert reaches on the same rows."""
    return {"name": f"vision-{name}", "tasks": suite_tasks(metrics, "image"), **_shared(list(metrics))}


def _shared(tasks: Sequence[str]) -> dict[str, list[list[str]]]:
    """A three is a three, whoever wrote it."""
    same = [task for task in DIGIT_TASKS if task in tasks]
    return {"shared_labels": [[f"{task}/{digit}" for task in same] for digit in DIGITS]} if len(same) > 1 else {}
