"""The demo on images: the experts that the vision suite has made on this machine, where they lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from massmerge.cli.demo.folder import PAGE, Demo, Placed, open_folder, place
from massmerge.errors import InputError, MassError
from massmerge.io.rows import read_table

_DIGIT_TASKS = ("mnist", "usps", "digits")
_ROWS = 60
_SHOWN = 3


def vision_folder() -> Path:
    """Where the vision suite keeps its base, experts and data: below `MASS_CACHE` or the user's cache folder."""
    root = os.environ.get("MASS_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "massmerge") / "suites" / "vision"


def make_vision_demo(folder: Path) -> Demo:
    """Lay the demo out: recipe and suite that name the suite's files, and some of its test images.

    Raises:
        InputError: the experts have not been built, or the folder holds something else.
        MassError: the folder cannot be written.
    """
    suite = vision_folder().resolve()
    tasks = [p.parent.name for p in sorted(suite.glob("experts/*/metrics.json")) if _test_rows(suite, p).is_file()]
    if len(tasks) < 2 or not (suite / "base" / "config.json").is_file():
        raise InputError(
            f"{suite}: no experts of the vision suite in it. Build them in a clone of the repository: make suite-vision "
            '(hours on two cores; ARGS="--quick" takes minutes and makes poor ones).'
        )
    open_folder(folder, "vision")
    placed = Placed()
    try:
        place(folder / "recipe.yaml", _yaml(_recipe(suite, tasks)), placed)
        place(folder / "suite.yaml", _yaml(_suite(suite, tasks)), placed)
        inputs = [_place_image(suite, task, folder, placed) for task in tasks[:: max(1, len(tasks) // _SHOWN)][:_SHOWN]]
    except OSError as error:
        raise MassError(f"{error.filename or folder}: cannot be written ({error.strerror}).") from None
    return Demo(
        folder,
        "DINOv2 ViT-S/14 at 98 pixels, from the vision suite",
        f"{len(tasks)} full fine-tunes of the vision suite, in {suite / 'experts'}",
        tuple(inputs),
        (
            ("mass predict out inputs", "answers all images of a folder"),
            (f"mass explain out {inputs[0]} --plot why.png", "a picture of it"),
            ("mass eval out suite.yaml --report report", "all test rows, with plots"),
            ("mass serve out --examples inputs", f"answers over HTTP, with a page to try it: {PAGE}"),
        ),
        placed,
        _ROWS,
    )


def _test_rows(suite: Path, metrics: Path) -> Path:
    return suite / "data" / metrics.parent.name / "test.parquet"


def _recipe(suite: Path, tasks: list[str]) -> dict[str, Any]:
    experts = [{"name": task, "expert": str(suite / "experts" / task)} for task in tasks]
    return {"base": str(suite / "base"), "tasks": experts, **_shared(tasks)}


def _suite(suite: Path, tasks: list[str]) -> dict[str, Any]:
    data = {
        task: {"data": str(suite / "data" / task / "{split}.parquet"), "input": "image", "label": "label"}
        for task in tasks
    }
    return {"name": "vision", "tasks": data, **_shared(tasks)}


def _shared(tasks: list[str]) -> dict[str, list[list[str]]]:
    """A three is a three, whoever wrote it."""
    same = [task for task in _DIGIT_TASKS if task in tasks]
    return {"shared_labels": [[f"{task}/{digit}" for task in same] for digit in range(10)]} if len(same) > 1 else {}


def _yaml(content: dict[str, Any]) -> bytes:
    return yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True).encode()


def _place_image(suite: Path, task: str, folder: Path, placed: Placed) -> str:
    """The first test image of a task as a file that is called after what it shows."""
    row = next(read_table(suite / "data" / task / "test.parquet", ["image", "label"]))
    if isinstance(row, InputError):
        raise row
    label = "".join(c if c.isalnum() else "-" for c in str(row["label"]))
    name = f"inputs/{task}-{label}.png"
    place(folder / name, row["image"], placed, "inputs/")
    return name
