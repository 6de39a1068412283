"""What a head's outputs mean: one label of several, any number of labels, or a number; and the labels' names."""

from __future__ import annotations

from pathlib import Path

from massmerge.bundle.layout import LINEAR
from massmerge.errors import InputError
from massmerge.io.json_file import read_json, read_object
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
    options = next((read_object(file) for file in files if file.is_file()), {})
    return problem_of(options.get("problem_type"), outputs)


def read_labels(path: Path) -> tuple[str, ...]:
    """The names of a head's labels, in the order of its outputs.

    Raises:
        InputError: the file holds anything else.
    """
    try:
        labels = read_json(path)
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}). Merge again.") from None
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        raise InputError(f"{path}: not a list of label names. Merge again.")
    return tuple(labels)
