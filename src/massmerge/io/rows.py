"""Inputs from wherever people keep them: the command line, standard input, text files, images, folders, tables."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from PIL import Image, UnidentifiedImageError

from massmerge.errors import InputError, MassError
from massmerge.io.addresses import is_address, split_address
from massmerge.io.remote_cache import local_rows

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
csv.field_size_limit(10**8)  # a cell may hold a book; 128 KiB is the default
_PARQUET_ROWS = 256  # a row may hold a picture; by default 65,536 would be in memory at once
_PARQUET_BUFFER = 1 << 20  # bytes; a file may be one group of rows, which would be read whole
TABLE_SUFFIXES = {".csv", ".tsv", ".jsonl", ".parquet"}


_NumberedRow = tuple[int | None, dict[str, Any] | InputError]
"""A row of a table with its number, from 1; with none an error of the whole file. Neither error says which file."""


class NamedInput(NamedTuple):
    """An input with the name it is reported under: a path, a file with a line number, or the text itself."""

    name: str
    item: Any
    """The input, or the error that stands in its place."""
    session: str | None = None
    """The source that it came from with others, where a column of its table tells."""


def read_inputs(
    given: Iterable[str],
    *,
    image: bool,
    column: str | None = None,
    session: str | None = None,
    stdin: TextIO | None = None,
    decoded: bool = True,
    whole: bool = False,
) -> Iterator[NamedInput]:
    """Every input that a command line names, one after the other; what cannot be read is an input that is an error.

    `-` is standard input, one input per line. A text file gives one input per line, a table one per row, a folder one per
    file. What lies at an address is copied to the cache first. For a text model anything that is not a file is the text
    itself, unless it looks like the name of one. `column` and `session` are columns of tables. Pictures in tables are given
    as bytes unless they are to be `decoded`. With `whole`, standard input and text files are one input each, and a list in
    a table stays one.
    """
    for argument in given:
        if is_remote(argument):
            copies = local_rows(argument)
            named = {str(copy): f"{argument}/{copy.name}" if len(copies) > 1 else argument for copy in copies}
            options = {"column": column, "session": session, "decoded": decoded, "whole": whole}
            for row in read_inputs(named, image=image, **options):  # type: ignore[arg-type]
                start = next((copy for copy in named if row.name.startswith(copy)), "")
                yield row._replace(name=named.get(start, "") + row.name.removeprefix(start))
            continue
        path = Path(argument)
        if argument == "-":
            yield from _lines("-", ["".join(stdin or [])] if whole else stdin or [])
        elif not argument.strip():
            yield NamedInput(repr(argument), InputError("empty text."))
        elif _is_folder(path):
            yield from _folder(path, image=image)
        elif _is_empty(path) or _looks_missing(path, argument, image=image):
            wrong = "the file is empty" if _exists(path) else "no such file"
            yield NamedInput(argument, InputError(f"{argument}: {wrong}."))
        elif path.suffix.lower() in TABLE_SUFFIXES and _exists(path):
            yield from _table(path, column, session, image=image, decoded=decoded, whole=whole)
        elif image:
            yield NamedInput(argument, path)
        elif _exists(path):
            yield from [NamedInput(argument, _read_text(path))] if whole else _text_file(path)
        else:
            yield NamedInput(argument if len(argument) <= 60 else argument[:57] + "…", argument)


def is_remote(argument: str) -> bool:
    """Whether an argument is the address of inputs. A link to a web page may be a text: there the ending must tell."""
    if not is_address(argument) or any(map(str.isspace, argument)):
        return False
    web = split_address(argument)[0] in ("http", "https")
    return not web or Path(argument).suffix.lower() in TABLE_SUFFIXES | IMAGE_SUFFIXES | {".txt", ".md"}


def is_file_or_folder(argument: str) -> bool:
    """Whether an argument is something to read from; what is not may be a text, or a slip of the pen."""
    return _exists(Path(argument)) or _is_folder(Path(argument)) or is_remote(argument)


def _exists(path: Path) -> bool:
    """Whether the path is a file; a long text is not a path."""
    try:
        return path.is_file()
    except OSError:
        return False


def _is_empty(path: Path) -> bool:
    return _exists(path) and path.stat().st_size == 0


def _looks_missing(path: Path, argument: str, *, image: bool) -> bool:
    """Whether an argument is the name of a file that is not there; for a text model, a word with a file's ending."""
    if _exists(path):
        return False
    return image or (path.suffix.lower() in TABLE_SUFFIXES | {".txt"} and not any(map(str.isspace, argument)))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _may_be_file(path: Path) -> bool:
    """Whether what a folder lists is to be read; where it is not told what it is, reading it says why."""
    try:
        return path.is_file()
    except OSError:
        return True


def _lines(name: str, lines: Iterable[str]) -> Iterator[NamedInput]:
    try:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield NamedInput(f"{name}:{number}", line.rstrip("\r\n"))
    except (UnicodeDecodeError, OSError) as error:
        yield NamedInput(name, InputError(f"{name}: {_why_unread(error)}"))


def _text_file(path: Path) -> Iterator[NamedInput]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from _lines(str(path), file)
    except OSError as error:
        yield NamedInput(str(path), InputError(f"{path}: {_why_unread(error)}"))


def _folder(folder: Path, *, image: bool) -> Iterator[NamedInput]:
    """The files of a folder and of those below it, sorted: images, or text files taken whole."""
    suffixes = IMAGE_SUFFIXES if image else {".txt", ".md"}
    found = False
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in suffixes and _may_be_file(p)):
        found = True
        yield NamedInput(str(path), path if image else _read_text(path))
    if not found:
        kinds = ", ".join(sorted(suffixes))
        yield NamedInput(str(folder), InputError(f"{folder}: no {'images' if image else 'texts'} in it ({kinds})."))


def _read_text(path: Path) -> str | InputError:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        return InputError(f"{path}: {_why_unread(error)}")


def _why_unread(error: UnicodeDecodeError | OSError) -> str:
    """Why a file of text cannot be read, and what to do."""
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})."
    return f"not UTF-8 text ({error.reason}). Save it as UTF-8."


def _table(
    path: Path, column: str | None, session: str | None, *, image: bool, decoded: bool, whole: bool
) -> Iterator[NamedInput]:
    """A column of a table; pictures in it are bytes, or paths relative to the table."""
    if column is None:
        yield NamedInput(str(path), InputError(f"{path}: name the column that holds the inputs: --column NAME."))
        return
    for number, row in _numbered_rows(path, [column, *([session] if session else [])]):
        name = str(path) if number is None else f"{path}:{number}"
        if isinstance(row, InputError):
            yield NamedInput(name, InputError(f"{name}: {row}"))
        elif row.get(column) in (None, ""):
            yield NamedInput(name, InputError(f"{name}: the column {column!r} is empty."))
        else:
            key = None if session is None or row[session] in (None, "") else str(row[session])
            cell = row[column]
            text = cell if whole and isinstance(cell, list) else str(cell)
            yield NamedInput(name, _picture(cell, path.parent, decoded) if image else text, key)


def read_table(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any] | InputError]:
    """Rows of a .csv, .tsv, .jsonl or .parquet file, one after the other; what cannot be read is an error in its place."""
    for _, row in _numbered_rows(path, columns):
        yield InputError(f"{path}: {row}") if isinstance(row, InputError) else row


def _numbered_rows(path: Path, columns: Sequence[str]) -> Iterator[_NumberedRow]:
    reader: Callable[[Path, Sequence[str]], Iterator[_NumberedRow]] = {
        ".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".parquet": _parquet,
    }[path.suffix.lower()]  # fmt: skip
    return reader(path, columns)


def _picture(cell: Any, folder: Path, decoded: bool) -> Any:
    """The picture of a cell, or its bytes."""
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    return picture(cell, folder) if decoded or not isinstance(data, bytes) else data


def picture(cell: Any, folder: Path) -> Any:
    """The picture of a cell: bytes of an image file, `{bytes, path}` as `datasets` writes it, or a path from `folder`."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    if isinstance(cell, bytes):
        try:
            return Image.open(io.BytesIO(cell))
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
            return InputError(f"not a readable image ({_without_address(error)}).")
    return folder / str(cell) if cell else InputError("contains neither an image nor a path.")


def _without_address(error: Exception) -> str:
    """What an error says; the address of a buffer is of no use to anyone, and differs from run to run."""
    return re.sub(r"<_io\.BytesIO object at \w+>", "these bytes", str(error))


def _csv(path: Path, columns: Sequence[str]) -> Iterator[_NumberedRow]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            missing = _first_missing(columns, reader.fieldnames or [])
            if missing is not None:
                yield None, _no_column(missing, reader.fieldnames or [])
                return
            yield from enumerate(reader, 1)
    except OSError as error:
        yield None, InputError(_why_unread(error))
    except (UnicodeDecodeError, csv.Error) as error:
        yield None, InputError(f"cannot be read as a table ({error}).")


def _jsonl(path: Path, columns: Sequence[str]) -> Iterator[_NumberedRow]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _json_row(line.rstrip("\r\n"), columns)
    except (UnicodeDecodeError, OSError) as error:
        yield None, InputError(_why_unread(error))


def _json_row(line: str, columns: Sequence[str]) -> dict[str, Any] | InputError:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return InputError(f"not valid JSON ({error.msg}, column {error.colno}).")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets within brackets
        return InputError(f"not valid JSON ({error}).")
    there = list(row) if isinstance(row, dict) else []
    missing = _first_missing(columns, there)
    return row if missing is None else _no_column(missing, there)


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[_NumberedRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise MassError("Parquet files need pyarrow: pip install 'massmerge[eval]'") from None
    try:
        # Otherwise every column is fetched ahead and kept until the last row has been read.
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_PARQUET_BUFFER)
        missing = _first_missing(columns, file.schema_arrow.names)
        if missing is not None:
            yield None, _no_column(missing, file.schema_arrow.names)
            return
        batches = file.iter_batches(batch_size=_PARQUET_ROWS, columns=list(columns))
        yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1)
    except (ArrowException, OSError) as error:
        yield None, InputError(f"cannot be read as Parquet ({error}).")


def _first_missing(columns: Iterable[str], there: Iterable[str]) -> str | None:
    known = set(there)
    return next((column for column in columns if column not in known), None)


def _no_column(column: str, there: Iterable[str]) -> InputError:
    return InputError(f"no column {column!r}; available: {', '.join(map(repr, there)) or 'none'}.")
