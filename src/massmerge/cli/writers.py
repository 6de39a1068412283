"""Answers as table, JSON lines, CSV or Parquet, written as they come."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Protocol, TextIO

import click

from massmerge.cli.common import escaped, plural, writing
from massmerge.errors import InputError, MassError
from massmerge.io.addresses import is_address
from massmerge.io.remote import put
from massmerge.io.remote_cache import staging_path
from massmerge.model.answers import Generation, Prediction

_COLUMNS = (
    "input", "task", "label", "confidence", "score", "weight", "runner_up", "error", "labels", "scores", "value",
)  # fmt: skip
_NUMBERS = ("confidence", "score", "weight", "value")
FORMATS = ("table", "jsonl", "csv", "parquet")
_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")  # may be regular files, but someone else has opened them


class Writer(Protocol):
    """Takes answers one after the other."""

    def write(self, name: str, prediction: Any) -> None:
        """One answer; generated texts too where the form is `jsonl`."""


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
        "confidence": prediction.confidence,
        "score": prediction.score,
        "weight": weight,
        "runner_up": f"{second.task}/{second.label}" if second else None,
        "error": prediction.error,
        "labels": prediction.labels,
        "scores": prediction.scores,
        "value": prediction.value,
    }


class TableWriter:
    """For people: one line per answer, in columns of fixed width."""

    def __init__(self) -> None:
        self._begun = False

    def write(self, name: str, prediction: Prediction) -> None:
        """One line; the header before the first."""
        if not self._begun:
            click.echo(click.style(f"{'task':<16} {'label':<20} {'confidence':>10}  {'score':>6}  input", bold=True))
            self._begun = True
        row = flat(name, prediction)
        if prediction.error:
            where = "" if prediction.error.startswith(name) else f"{name}: "
            click.echo(f"{click.style('error'.ljust(16), fg='red')} {where}{prediction.error}")
            return
        shown, scores = row["label"] or "", [row["score"] if row["value"] is None else row["value"]]
        if prediction.labels is not None:
            shown, scores = ", ".join(prediction.labels) or "no label", prediction.scores or []
        shown = "; ".join([shown, *(f"{head}: {_answer_of(one)}" for head, one in prediction.heads.items())])
        score = ", ".join(f"{one:.3f}" for one in scores if one is not None)
        sure = "" if row["confidence"] is None else f"{row['confidence']:.3f}"
        task = f"{row['task']:<16}" if row["task"] else click.style(f"{'unknown':<16}", fg="yellow")
        click.echo(f"{task} {shown:<20} {sure:>10}  {score:>6}  {name}")


def _answer_of(prediction: Prediction) -> str:
    """What a further head answers, in a few words."""
    if prediction.labels is not None:
        return ", ".join(prediction.labels) or "no label"
    return str(prediction.label) if prediction.value is None else f"{prediction.value:.3f}"


class JsonLinesWriter:
    """One JSON object per line, with everything that is known of the answer."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, name: str, prediction: Prediction | Generation) -> None:
        """One line."""
        self._file.write(json.dumps({"input": name, **prediction.to_dict()}, ensure_ascii=False) + "\n")
        self._file.flush()


class CsvWriter:
    """One row per answer."""

    def __init__(self, file: TextIO) -> None:
        self._writer = csv.DictWriter(file, _COLUMNS)
        self._writer.writeheader()

    def write(self, name: str, prediction: Prediction) -> None:
        """One row; lists as JSON."""
        row = flat(name, prediction)
        self._writer.writerow(
            {k: json.dumps(v, ensure_ascii=False) if isinstance(v, list) else v for k, v in row.items()}
        )


class ParquetWriter:
    """Row groups of some thousand answers each."""

    _GROUP = 4096

    def __init__(self, file: IO[bytes]) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise MassError("Parquet files need pyarrow: pip install 'massmerge[eval]'") from None
        text, number = pyarrow.string(), pyarrow.float64()
        lists = {"labels": pyarrow.list_(text), "scores": pyarrow.list_(number)}
        kinds = {name: lists.get(name, number if name in _NUMBERS else text) for name in _COLUMNS}
        self._arrow, self._schema = pyarrow, pyarrow.schema(list(kinds.items()))
        self._file = parquet.ParquetWriter(file, self._schema)
        self._rows: list[dict[str, Any]] = []

    def write(self, name: str, prediction: Prediction) -> None:
        """One row, written when its group is full."""
        row = flat(name, prediction)
        self._rows.append({name: escaped(value) if isinstance(value, str) else value for name, value in row.items()})
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


class _Counted:
    """A writer that knows how many answers it was given."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self.count = writer, 0

    def write(self, name: str, prediction: Prediction) -> None:
        """One answer."""
        self._writer.write(name, prediction)
        self.count += 1


@contextmanager
def open_writer(form: str, out: str | None) -> Iterator[Writer]:
    """A writer to standard output, or to a file or an address where they appear when all answers are in."""
    if out is not None and is_address(out):
        with _sent(out) as copy, open_writer(form, copy) as writer:
            yield writer
        return
    draft = None if out is None else _draft_of(out)
    if out is None:
        yield TableWriter() if form == "table" else _text_writer(form, sys.stdout)
    elif draft is None:
        with writing(out), _writer_to(Path(out), form) as writer:
            yield writer
    else:
        with writing(out, draft), _replacing(out, draft, form) as writer:
            yield writer


@contextmanager
def _sent(address: str) -> Iterator[str]:
    """A file in the cache that is sent to an address when all answers are in it."""
    copy = staging_path(address)
    copy.unlink(missing_ok=True)
    yield str(copy)
    if copy.is_file():
        put(copy, address)
        shutil.rmtree(copy.parent)


def _draft_of(out: str) -> Path | None:
    """The file beside `out` that takes its place in the end; none for a pipe or a device, which is written as it is."""
    path = Path(out)
    if out.startswith(_STREAMS) or (path.exists() and not path.is_file()):
        return None
    path = path.resolve() if path.is_symlink() else path
    return path.with_name(f".{path.name}.draft")


@contextmanager
def _replacing(out: str, draft: Path, form: str) -> Iterator[_Counted]:
    """A writer to the draft. Until all is written `out` is as it was: it may be among the inputs, or the call be wrong.

    A run that is stopped keeps the answers that it has in the draft, for they may be the work of a night.
    """
    writer = None
    try:
        with _writer_to(draft, form) as writer:
            yield writer
        if writer.count:
            _publish(draft, Path(out).resolve())
    except OSError:  # a full disk; what is in the draft has no end
        draft.unlink(missing_ok=True)
        raise
    except BaseException:
        if writer is not None and writer.count:
            so_far = f"{plural(writer.count, 'answer')} so far {'is' if writer.count == 1 else 'are'}"
            click.echo(f"warning: the {so_far} in {draft}, not in {out}", err=True)
        raise
    finally:
        if writer is None or not writer.count:
            draft.unlink(missing_ok=True)


def _publish(draft: Path, target: Path) -> None:
    if target.exists():
        shutil.copymode(target, draft)
    draft.replace(target)


@contextmanager
def _writer_to(path: Path, form: str) -> Iterator[_Counted]:
    if form == "parquet":
        with path.open("wb") as binary, closing(ParquetWriter(binary)) as parquet:
            yield _Counted(parquet)
    else:
        with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            yield _Counted(_text_writer(form, file))


def _text_writer(form: str, file: TextIO) -> Writer:
    return CsvWriter(file) if form == "csv" else JsonLinesWriter(file)


def choose_format(wanted: str | None, out: str | None, *, as_json: bool) -> str:
    """The format of the answers: from an option or the file name, else a table."""
    suffix = Path(out or "").suffix.lower().lstrip(".")
    ending = {"json": "jsonl"}.get(suffix, suffix)
    told = {"--json": "jsonl"} if as_json else {}
    if wanted is not None:
        told[f"--format {wanted}"] = wanted
    if ending in FORMATS:
        told[f"--out {out}"] = ending
    for (option, form), (other, another) in pairwise(told.items()):
        if form != another:
            raise InputError(f"{option} means {form}, {other} means {another}. Leave one of them out.")
    form = next(iter(told.values()), ending or "table")
    if form not in FORMATS or (form == "table" and out is not None) or (form == "parquet" and out is None):
        raise InputError(f"cannot write {form!r} there. Give --out a name that ends in .jsonl, .csv or .parquet.")
    return form
