"""Every answer of an evaluation as a table."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from massmerge.evaluation.metrics import own_label, shared_groups
from massmerge.evaluation.results import Evaluation, RowResult
from massmerge.evaluation.suite import label_set
from massmerge.io.durable import drafted

_GROUP = 16_384  # rows that are objects at a time


def write_predictions(found: Evaluation, folder: Path) -> Path:
    """Every row of the stream, as Parquet if pyarrow is there, else as CSV; returns the file's path."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        path, rows = folder / "predictions.csv", _predictions(found)
        first = next(rows)
        with drafted(path) as draft, draft.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(first))
            writer.writeheader()
            writer.writerow(first)
            writer.writerows(rows)
        return path
    path = folder / "predictions.parquet"
    with drafted(path) as draft:
        _write_parquet(pyarrow, parquet, _predictions(found), draft)
    return path


def _write_parquet(arrow: Any, parquet: Any, rows: Iterator[dict[str, Any]], path: Path) -> None:
    """Row groups of some thousand answers each, which are all that is held."""
    groups = iter(lambda: list(islice(rows, _GROUP)), [])
    first = next(groups)
    schema = arrow.schema({name: _type_of(name, arrow) for name in first[0]})
    with parquet.ParquetWriter(path, schema) as writer:
        for group in chain([first], groups):
            writer.write_table(arrow.Table.from_pylist(group, schema))


def _type_of(column: str, arrow: Any) -> Any:
    if column in ("right", "right_shared"):
        return arrow.bool_()
    number = column in ("score", "confidence") or column.startswith("residual_")
    return arrow.float64() if number else arrow.string()


def _predictions(found: Evaluation) -> Iterator[dict[str, Any]]:
    names = found.confusion.columns[:-2]
    groups = shared_groups(found.options["shared_labels"])
    numbers = {task.task for task in found.tasks if task.metric == "spearman"}  # no value is simply right or wrong
    for row in found.results:
        residuals = row.residuals or [None] * len(names)
        yield {
            "row": found.names[row.task][row.place],
            "task": row.task,
            "label": _shown(row.label),
            "answered_task": row.given.task,
            "answered_label": _shown(row.given.label),
            "score": row.given.score,
            "confidence": row.confidence,
            "right": None if row.task in numbers else is_right(row, {}),
            "right_shared": None if row.task in numbers else is_right(row, groups),
            "selected": " ".join(row.selected),
            "label_task_known": _shown(row.known.label),
            "label_expert": _shown(row.expert.label),
            "error": row.error,
            **{f"residual_{name}": value for name, value in zip(names, residuals, strict=True)},
        }


def _shown(label: str | None) -> str | None:
    """A label as it is, the labels of a set side by side."""
    return None if label is None else ", ".join(sorted(label_set(label)))


def is_right(row: RowResult, groups: dict[str, int]) -> bool:
    """Whether the pair (task, label) is right, up to labels that mean the same; of several labels whether all are."""
    return own_label(row.task, row.label, row.given, groups) == row.label
