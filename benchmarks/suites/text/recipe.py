"""Recipes and suite files of the text suite, written beside its base, experts and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.suites.recipes import Metrics, read_metrics, suite_tasks, write_pair
from benchmarks.suites.text import backbone
from benchmarks.suites.text.experts import FOLDERS, Kind
from benchmarks.suites.text.tasks import ALIKE, CORE, TASKS, WIDE

SETS: dict[str, tuple[str, ...]] = {
    "core": tuple(CORE),
    "wide": WIDE,
    "alike": ALIKE,
    "all": tuple(TASKS),
    "lora": tuple(CORE),
    "lora_same_start": tuple(CORE),
    "mixed": tuple(CORE),
    "seed1": tuple(CORE),
    "seed2": tuple(CORE),
}
_ADAPTERS_OF_MIXED = frozenset(tuple(CORE)[1::2])


def kind_of(name: str, task: str) -> Kind:
    """What a task's expert is in a set: `mixed` has adapters beside full fine-tunes."""
    name = name.removesuffix("-part")
    if name == "mixed":
        return "lora" if task in _ADAPTERS_OF_MIXED else "full"
    return next((kind for kind in FOLDERS if kind == name), "full")


def write_files(name: str, tasks: Sequence[str], folder: Path | None = None) -> tuple[Path, Path]:
    """Write `recipe-NAME.yaml` and `suite-NAME.yaml` for some tasks; paths inside are relative to them.

    Args:
        name: what the two files are called after, and the set whose kind of experts they take.
        tasks: names of the tasks, in the recipe's order. Each must have its expert.
        folder: where base, experts and data lie; the text suite's part of the cache if not given.

    Returns:
        The paths of the recipe and of the suite.
    """
    folder = folder or backbone.folder()
    where = {task: FOLDERS[kind_of(name, task)] for task in tasks}
    metrics = {task: read_metrics(folder / where[task], [task])[task] for task in tasks}
    return write_pair(folder, name, recipe(where), suite(name, metrics))


def recipe(where: Mapping[str, str]) -> dict[str, Any]:
    """A recipe with defaults only, so that what is measured is what a user gets; of each task, the folder of its expert."""
    return {
        "base": "base",
        "tasks": [
            {
                "name": task,
                "expert": f"{experts}/{task}",
                "head": {
                    "weights": f"{experts}/{task}/head.safetensors",
                    "labels": f"{experts}/{task}/labels.json",
                    "features": "mean",
                },
            }
            for task, experts in where.items()
        ],
    }


def suite(name: str, metrics: Metrics) -> dict[str, Any]:
    """The suite: each task's data, and as reference what its expert reaches on the same rows."""
    return {"name": f"text-{name}", "tasks": suite_tasks(metrics, "text")}
