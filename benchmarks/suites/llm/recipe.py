"""Recipes and suite files of the suite of a language model, written beside its base, adapters and data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suites.llm.backbone import folder
from benchmarks.suites.llm.experts import KINDS, Kind, form_of
from benchmarks.suites.llm.tasks import TASKS
from benchmarks.suites.recipes import read_metrics, write_pair

SETS: dict[str, tuple[str, ...]] = {kind: tuple(TASKS) for kind in KINDS}
NEW_TOKENS = 12


def kind_of(name: str, task: str) -> Kind:
    """What a task's adapter is in a set, which is called after it."""
    plain = name.removesuffix("-part")
    return next(kind for kind in KINDS if kind == plain)


def write_files(name: str, tasks: Sequence[str]) -> tuple[Path, Path]:
    """Write `recipe-NAME.yaml` and `suite-NAME.yaml` for some tasks; paths inside are relative to them."""
    kind = kind_of(name, tasks[0])
    read_metrics(folder() / f"experts_{kind}", tasks)
    return write_pair(folder(), name, recipe(kind, tasks), suite(name, kind, tasks))


def recipe(kind: Kind, tasks: Sequence[str]) -> dict[str, Any]:
    """A recipe with defaults only, so that what is measured is what a user gets; bare texts are named as such."""
    router = {"router": {"reference": "newline"}} if form_of(kind) == "bare" else {}
    return {"base": "base", "tasks": [{"name": task, "expert": f"experts_{kind}/{task}"} for task in tasks], **router}


def suite(name: str, kind: Kind, tasks: Sequence[str]) -> dict[str, Any]:
    """The suite: prompts as the adapters were trained on, and the answers that they should have."""
    rows = {"data": f"data/{form_of(kind)}/{{task}}/{{split}}.parquet", "input": "text", "label": "label"}
    return {
        "name": f"llm-{name}",
        "generate": {"max_new_tokens": NEW_TOKENS},
        "tasks": {task: {**rows, "data": rows["data"].replace("{task}", task)} for task in tasks},
    }
