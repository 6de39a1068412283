"""Recipes and suite files of the text suite, written beside its base, experts and data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.suites.text import backbone
from benchmarks.suites.text.experts import FOLDERS, Kind
from benchmarks.suites.text.tasks import CORE, EXTENDED, TASKS
from massmerge.errors import InputError

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
    experts = folder / FOLDERS[kind_of(name)]
    missing = [task for task in tasks if not (experts / task / "metrics.json").is_file()]
    if missing:
        raise InputError(f"no expert for {', '.join(missing)} in {experts}. Run the finetune step first.")
    metrics = {task: json.loads((experts / task / "metrics.json").read_text(encoding="utf-8")) for task in tasks}
    recipe_path, suite_path = folder / f"recipe-{name}.yaml", folder / f"suite-{name}.yaml"
    recipe_path.write_text(yaml.safe_dump(recipe(tasks, kind_of(name)), sort_keys=False, width=120), encoding="utf-8")
    suite_path.write_text(yaml.safe_dump(suite(name, metrics), sort_keys=False, width=120), encoding="utf-8")
    return recipe_path, suite_path


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


def suite(name: str, metrics: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The suite: each task's data, and as reference what its expert reaches on the same rows."""
    tasks = {
        task: {
            "data": f"data/{task}/{{split}}.parquet",
            "input": "text",
            "label": "label",
            # An accuracy of 0 cannot be a reference; it can occur in a quick run only.
            "reference": {split: share for split, share in found["finetuned"].items() if share > 0},
        }
        for task, found in metrics.items()
    }
    return {"name": f"text-{name}", "tasks": tasks}
