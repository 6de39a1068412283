"""Answers as table, JSON lines, CSV or Parquet, written as they come."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, Protocol, TextIO

import click

from massmerge.answers import Prediction
from massmerge.errors import InputError, MassError

_COLUMNS = ("input", "task", "label", "score", "weight", "runner_up", "error")
FORMATS = ("table", "jsonl", "csv", "parquet")


class Writer(Protocol):
    """Takes answers one after the other."""

    def write(self, name: str, prediction: Prediction) -> None:
        """One answer."""

    def close(self) -> None:
        """No more of them."""


def flat(name: str, prediction: Prediction) -> dict[str, Any]:
    """An answer as one row of plain values."""
    weight = None
    if prediction.routing and prediction.routing.selected:
        weight = prediction.routing.weights.get(prediction.task or prediction.routing.selected[0])
    second = prediction.alternatives[0] if prediction.alternatives else None
    return {
        "input": name,
        "task": prediction.task,
        "label": prediction.label,
        "score": prediction.score,
        "weight": weight,
        "runner_up": f"{second.task}/{second.label}" if second else None,
        "error": prediction.error,
    }


class TableWriter:
    """For people: a line an answer, in columns of fixed width."""

    def __init__(self) -> None:
        self._begun = False

    def write(self, name: str, prediction: Prediction) -> None:
        """One line; the header before the first."""
        if not self._begun:
            click.echo(click.style(f"{'task':<16} {'label':<20} {'score':>6}  {'weight':>6}  input", bold=True))
            self._begun = True
        row = flat(name, prediction)
        if prediction.error:
            where = "" if prediction.error.startswith(name) else f"{name}: "
            click.echo(f"{click.style('error'.ljust(16), fg='red')} {where}{prediction.error}")
            return
        score = "" if row["score"] is None else f"{row['score']:.3f}"
        weight = "" if row["weight"] is None else f"{row['weight']:.3f}"
        task = f"{row['task']:<16}" if row["task"] else click.style(f"{'unknown':<16}", fg="yellow")
        click.echo(f"{task} {row['label'] or '':<20} {score:>6}  {weight:>6}  {name}")

    def close(self) -> None:
        """Nothing to do."""


class JsonLinesWriter:
    """A JSON object a line, with everything that is known of the answer."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, name: str, prediction: Prediction) -> None:
        """One line."""
        self._file.write(json.dumps({"input": name, **prediction.to_dict()}, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing to do: the file's owner closes it."""


class CsvWriter:
    """A row an answer."""

    def __init__(self, file: TextIO) -> None:
        self._writer = csv.DictWriter(file, _COLUMNS)
        self._writer.writeheader()

    def write(self, name: str, prediction: Prediction) -> None:
        """One row."""
        self._writer.writerow(flat(name, prediction))

    def close(self) -> None:
        """Nothing to do: the file's owner closes it."""


class ParquetWriter:
    """Row groups of some thousand answers each."""

    _GROUP = 4096

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise MassError("Parquet files need pyarrow: pip install 'massmerge[eval]'") from None
        text, number = pyarrow.string(), pyarrow.float64()
        kinds = {name: number if name in ("score", "weight") else text for name in _COLUMNS}
        self._arrow, self._schema = pyarrow, pyarrow.schema(list(kinds.items()))
        self._file = parquet.ParquetWriter(path, self._schema)
        self._rows: list[dict[str, Any]] = []

    def write(self, name: str, prediction: Prediction) -> None:
        """One row, written when its group is full."""
        self._rows.append(flat(name, prediction))
        if len(self._rows) >= self._GROUP:
            self._flush()

    def _flush(self) -> None:
        self._file.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        """Write what is left and end the file."""
        if self._rows:
            self._flush()
        self._file.close()


def choose_format(wanted: str | None, out: str | None, *, as_json: bool) -> str:
    """The format of the answers: as told, else by the name of the file, else a table."""
    if wanted is None and out is not None:
        suffix = Path(out).suffix.lower().lstrip(".")
        wanted = {"json": "jsonl"}.get(suffix, suffix)
    wanted = wanted or ("jsonl" if as_json else "table")
    if wanted not in FORMATS or (wanted == "table" and out is not None) or (wanted == "parquet" and out is None):
        raise InputError(f"cannot write {wanted!r} there. Give --out a name that ends in .jsonl, .csv or .parquet.")
    return wanted
