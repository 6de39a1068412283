"""Recipes and suite files of the vision suite, written beside its base, experts and data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.suites.fetch import cache_root
from benchmarks.suites.vision.tasks import CORE, DIGITS, EXTENDED, TASKS
from massmerge.errors import InputError

DIGIT_TASKS = ("mnist", "usps", "digits")
SETS: dict[str, tuple[str, ...]] = {"core": tuple(CORE), "extended": tuple(EXTENDED), "all": tuple(TASKS)}


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
    missing = [task for task in tasks if not (folder / "experts" / task / "metrics.json").is_file()]
    if missing:
        raise InputError(f"no expert for {', '.join(missing)} in {folder / 'experts'}. Run the finetune step first.")
    metrics = {task: json.loads((folder / "experts" / task / "metrics.json").read_text()) for task in tasks}
    recipe_path, suite_path = folder / f"recipe-{name}.yaml", folder / f"suite-{name}.yaml"
    recipe_path.write_text(yaml.safe_dump(recipe(tasks), sort_keys=False, width=120), encoding="utf-8")
    suite_path.write_text(yaml.safe_dump(suite(name, metrics), sort_keys=False, width=120), encoding="utf-8")
    return recipe_path, suite_path


def recipe(tasks: Sequence[str]) -> dict[str, Any]:
    """A recipe with defaults only, so that what is measured is what a user gets."""
    return {
        "base": "base",
        "tasks": [{"name": task, "expert": f"experts/{task}"} for task in tasks],
        **_shared(tasks),
    }


def suite(name: str, metrics: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The suite: each task's data, and as reference what its expert reaches on the same rows."""
    tasks = {
        task: {
            "data": f"data/{task}/{{split}}.parquet",
            "input": "image",
            "label": "label",
            # An accuracy of 0 cannot be a reference; it can occur in a quick run only.
            "reference": {split: share for split, share in found["finetuned"].items() if share > 0},
        }
        for task, found in metrics.items()
    }
    return {"name": f"vision-{name}", "tasks": tasks, **_shared(list(metrics))}


def _shared(tasks: Sequence[str]) -> dict[str, list[list[str]]]:
    """A three is a three, whoever wrote it."""
    same = [task for task in DIGIT_TASKS if task in tasks]
    return {"shared_labels": [[f"{task}/{digit}" for task in same] for digit in DIGITS]} if len(same) > 1 else {}
