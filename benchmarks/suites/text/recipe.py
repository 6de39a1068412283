"""Recipes and suite files of the text suite, written beside its base, experts and data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suites.recipes import Metrics, read_metrics, suite_tasks, write_pair
from benchmarks.suites.text import backbone
from benchmarks.suites.text.experts import FOLDERS, Kind
from benchmarks.suites.text.tasks import CORE, EXTENDED, TASKS

SETS: dict[str, tuple[str, ...]] = {
    "core": tuple(CORE),
    "extended": tuple(EXTENDED),
    "all": tuple(TASKS),
    "lora": tuple(CORE),
}


def kind_of(name: str) -> Kind:
    """Whether a set of tasks is made of adapters or of full fine-tunes."""
    return "lora" if name.startswith("lora") else "full"


def write_files(name: str, tasks: Sequence[str], folder: Path | None = None) -> tuple[Path, Path]:
    """Write `recipe-NAME.yaml` and `suite-NAME.yaml` for some tasks; paths inside are relative to them.

    Args:
        name: what the two files are called after. A name that starts with `lora` takes the adapters.
        tasks: names of the tasks, in the recipe's order. Each must have its expert.
        folder: where base, experts and data lie; the text suite's part of the cache if not given.

    Returns:
        The paths of the recipe and of the suite.
    """
    folder = folder or backbone.folder()
    metrics = read_metrics(folder / FOLDERS[kind_of(name)], tasks)
    return write_pair(folder, name, recipe(tasks, kind_of(name)), suite(name, metrics))


def recipe(tasks: Sequence[str], kind: Kind) -> dict[str, Any]:
    """A recipe with defaults only, so that what is measured is what a user gets."""
    where = FOLDERS[kind]
    return {
        "base": "base",
        "tasks": [
            {
                "name": task,
                "expert": f"{where}/{task}",
                "head": {
                    "weights": f"{where}/{task}/head.safetensors",
                    "labels": f"{where}/{task}/labels.json",
                    "features": "mean",
                },
            }
            for task in tasks
        ],
    }


def suite(name: str, metrics: Metrics) -> dict[str, Any]:
    """The suite: each task's data, and as reference what its expert reaches on the same rows."""
    return {"name": f"text-{name}", "tasks": suite_tasks(metrics, "text")}
