"""What a head's outputs mean: one label of several, any number of labels, or a number."""

from __future__ import annotations

import json
from pathlib import Path

from massmerge.bundle.layout import LINEAR
from massmerge.errors import InputError
from massmerge.recipe import ProblemType


def problem_of(said: str | None, outputs: int) -> ProblemType:
    """What a head's outputs mean, by Hugging Face's `problem_type` and their number.

    Raises:
        InputError: it predicts several numbers, which is not supported.
    """
    if said == "multi_label_classification":
        return "multi_label_classification"
    if said == "regression" and outputs > 1:
        raise InputError(
            f"its head is a regression with {outputs} outputs; one output is supported. If these are labels, set "
            "`problem_type: single_label_classification` or `multi_label_classification` in the recipe."
        )
    return "regression" if outputs == 1 else "single_label_classification"


def read_problem(folder: Path, outputs: int) -> ProblemType:
    """The same of a head that was written to a folder."""
    files = (folder / name for name in (LINEAR, "config.json"))
    options: dict[str, str] = next(
        (json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()), {}
    )
    return problem_of(options.get("problem_type"), outputs)
