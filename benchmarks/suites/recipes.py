"""What the recipes and suite files of all suites share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from massmerge.errors import InputError

Metrics = dict[str, dict[str, Any]]
"""By task, what was found when its expert was made."""


def read_metrics(experts: Path, tasks: Sequence[str]) -> Metrics:
    """What was found when each task's expert was made.

    Raises:
        InputError: a task has no expert in that folder.
    """
    missing = [task for task in tasks if not (experts / task / "metrics.json").is_file()]
    if missing:
        raise InputError(f"no expert for {', '.join(missing)} in {experts}. Run the finetune step first.")
    return {task: json.loads((experts / task / "metrics.json").read_text(encoding="utf-8")) for task in tasks}


def suite_tasks(metrics: Metrics, column: Literal["text", "image"]) -> dict[str, dict[str, Any]]:
    """The tasks of a suite: their data, and as reference what each expert reaches on the same rows."""
    return {
        task: {
            "data": f"data/{task}/{{split}}.parquet",
            "input": column,
            "label": "label",
            # An accuracy of 0 cannot be a reference; it can occur in a quick run only.
            "reference": {split: share for split, share in found["finetuned"].items() if share > 0},
        }
        for task, found in metrics.items()
    }


def write_pair(folder: Path, name: str, recipe: Mapping[str, Any], suite: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write `recipe-NAME.yaml` and `suite-NAME.yaml`; returns their paths."""
    paths = folder / f"recipe-{name}.yaml", folder / f"suite-{name}.yaml"
    for path, content in zip(paths, (recipe, suite), strict=True):
        path.write_text(yaml.safe_dump(dict(content), sort_keys=False, width=120), encoding="utf-8")
    return paths
