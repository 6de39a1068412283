"""Rows in Arrow files: the inputs that a worker is given, and its answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from massmerge.errors import MassError
from massmerge.io.spool import packed, unpacked

SUFFIX = ".arrow"
_COLUMN = "row"


def write_inputs(path: Path, items: Iterable[Any]) -> None:
    """Inputs as a model takes them; images as bytes, files as paths that every machine knows."""
    _write(path, [packed(item.resolve() if isinstance(item, Path) else item) for item in items])


def read_inputs(path: Path) -> Iterator[Any]:
    """The inputs again, one after the other."""
    return map(unpacked, _read(path))


def write_answers(path: Path, answers: Iterable[dict[str, Any]]) -> None:
    """Answers as plain data."""
    _write(path, [json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") for answer in answers])


def read_answers(path: Path) -> Iterator[dict[str, Any]]:
    """The answers again, one after the other."""
    return (json.loads(row.decode("utf-8", "surrogatepass")) for row in _read(path))


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MassError("rows on other machines need pyarrow: pip install 'massmerge[ray]'") from None
    return pyarrow


def _write(path: Path, rows: list[bytes]) -> None:
    arrow = _arrow()
    table = arrow.table({_COLUMN: arrow.array(rows, arrow.large_binary())})
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _read(path: Path) -> Iterator[bytes]:
    """Rows of a file, which is mapped: only those that are looked at come to memory."""
    arrow = _arrow()
    with arrow.memory_map(str(path)) as file:
        reader = arrow.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield from (row.as_py() for row in reader.get_batch(number).column(0))
