"""Where the rows of a suite lie: tables, folders of files by class, ids of the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from massmerge.errors import InputError, MassError
from massmerge.evaluation.suite import SuiteTask
from massmerge.io.remote_cache import path_of
from massmerge.io.rows import IMAGE_SUFFIXES, TABLE_SUFFIXES, read_table

_TEXT_SUFFIXES = {".txt", ".md"}


class RowSource(Protocol):
    """Where the rows of a task lie."""

    @property
    def where(self) -> str:
        """Path or id, for messages."""
        ...

    def labels(self) -> Iterator[Any]:
        """The label of every row, as the source has it."""
        ...

    def inputs(self, rows: Sequence[int]) -> Iterator[Any]:
        """The inputs of some rows, which are given in ascending order; an error stands for what cannot be read."""
        ...

    def row_name(self, row: int) -> str:
        """How a row is called in reports."""
        ...


class FolderSource:
    """A folder with a folder for each class."""

    def __init__(self, path: Path, *, image: bool) -> None:
        self.where, self._image = str(path), image
        if not path.is_dir():
            raise InputError(f"{path}: no such folder.")
        suffixes = IMAGE_SUFFIXES if image else _TEXT_SUFFIXES
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in suffixes and p.is_file())
        classes = [p.relative_to(path).parts[0] for p in found if p.parent != path]
        kinds = ", ".join(sorted(suffixes))
        if len(classes) < len(found):
            stray = next(p for p in found if p.parent == path)
            raise InputError(f"{stray}: is not in a class folder. Move it to {path}/CLASS/{stray.name}.")
        if not found:
            raise InputError(
                f"{path}: contains no class folders. Create one folder per class with its files ({kinds})."
            )
        self._files, self._classes = found, classes

    def labels(self) -> Iterator[str]:
        """The name of the folder that each file lies in."""
        return iter(self._classes)

    def inputs(self, rows: Sequence[int]) -> Iterator[Any]:
        """Paths of images, or whole texts."""
        for row in rows:
            path = self._files[row]
            try:
                yield path if self._image else path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                yield InputError(f"cannot be read ({error}).")

    def row_name(self, row: int) -> str:
        """The file's path."""
        return str(self._files[row])


class TableSource:
    """A .csv, .tsv, .jsonl or .parquet file."""

    def __init__(self, path: Path, columns: Sequence[str], label: str, *, image: bool) -> None:
        self._path, self._columns, self._label, self._image = path, list(columns), label, image
        self.where = str(path)
        if not path.is_file():
            beside = sorted(p.name for p in path.parent.glob(f"*{path.suffix}")) if path.parent.is_dir() else []
            there = f" Its folder holds {', '.join(beside[:12])}." if beside else ""
            raise InputError(f"{path}: no such file.{there}")
        if path.suffix.lower() not in TABLE_SUFFIXES:
            raise InputError(
                f"{path}: not a supported table. Use a file that ends in {', '.join(sorted(TABLE_SUFFIXES))}."
            )

    def labels(self) -> Iterator[Any]:
        """The label column."""
        next(self._rows([*self._columns, self._label]), None)  # columns that are missing are told before a pass
        for row in self._rows([self._label]):
            yield row[self._label]

    def inputs(self, rows: Sequence[int]) -> Iterator[Any]:
        """The input columns of some rows."""
        wanted = iter(rows)
        row = next(wanted, None)
        for number, values in enumerate(read_table(self._path, self._columns)):
            if row is None:
                return
            if number == row:
                yield values if isinstance(values, InputError) else self._input(values)
                row = next(wanted, None)

    def row_name(self, row: int) -> str:
        """The file with the row's number, from 1."""
        return f"{self.where}:{row + 1}"

    def _input(self, row: dict[str, Any]) -> Any:
        return _cell([row[column] for column in self._columns], self._path.parent, image=self._image)

    def _rows(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(read_table(self._path, columns), 1):
            if isinstance(row, InputError):
                raise row if number == 1 else InputError(f"row {number} of {row}")
            yield row


class DatasetSource:
    """A split of a dataset, by the `datasets` library."""

    def __init__(self, task: SuiteTask, folder: Path, split: str | None, *, image: bool) -> None:
        place, name = task.place(split), task.split_name(split)
        self.where = f"{place} ({name})"
        self._columns, self._label, self._image, self._folder = task.columns, task.label_column, image, folder
        if split is not None and (folder / place / "state.json").is_file():
            raise InputError(f"{place}: the split {split!r} was requested, but this dataset was saved without splits.")
        rows = _load_dataset(place, task.config, name, folder)
        for column in (*self._columns, self._label):
            if column not in rows.column_names:
                there = ", ".join(map(repr, rows.column_names))
                raise InputError(f"{self.where}: no column {column!r}; available: {there}.")
        # A list of labels is by number: then the dataset's own names do not matter.
        kind = rows.features[self._label]
        names = None if isinstance(task.labels, list) else getattr(getattr(kind, "feature", kind), "names", None)
        self._names: list[str] | None = names
        self._transposed = task.transposed
        self._rows = _without_decoding(rows, self._columns) if image else rows

    def labels(self) -> Iterator[Any]:
        """The label column; numbers of a class label, or in a list of them, as the names that the dataset gives them."""
        for row in self._rows.select_columns([self._label]):
            value = row[self._label]
            yield [self._named(one) for one in value] if isinstance(value, list) else self._named(value)

    def _named(self, number: Any) -> Any:
        named = self._names is not None and isinstance(number, int) and 0 <= number < len(self._names)
        return self._names[number] if self._names and named else number

    def inputs(self, rows: Sequence[int]) -> Iterator[Any]:
        """The input columns of some rows."""
        for row in self._rows.select_columns(self._columns).select(rows):
            value = _cell([row[column] for column in self._columns], self._folder, image=self._image)
            yield _exchanged(value) if self._transposed else value

    def row_name(self, row: int) -> str:
        """The dataset with the row's number, from 1."""
        return f"{self.where}:{row + 1}"


def _load_dataset(place: str, config: str | None, split: str, folder: Path) -> Any:
    try:
        import datasets
    except ImportError:
        raise MassError("dataset ids need the datasets library: pip install 'massmerge[eval]'") from None
    local = folder / place
    try:
        if (local / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(local))[split]
        if (local / "state.json").is_file():
            return datasets.load_from_disk(str(local))
        name, _, revision = place.partition("@")
        given = str(local) if local.exists() else name
        return datasets.load_dataset(given, config, split=split, revision=revision or None)
    except Exception as error:  # the library passes on errors of every format and transport
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(
            f"{place} (split {split!r}{f', config {config!r}' if config else ''}): not available from datasets ({reason}). "
            "Check id, config and split; a hub id has to be downloaded once while online."
        ) from None


def _without_decoding(rows: Any, columns: Sequence[str]) -> Any:
    """Pictures as bytes: they are decoded when their turn comes."""
    import datasets

    for column in columns:
        if isinstance(rows.features[column], datasets.Image):
            rows = rows.cast_column(column, datasets.Image(decode=False))
    return rows


def _cell(values: list[Any], folder: Path, *, image: bool) -> Any:
    """An input from its cells: a picture's bytes or path, a text, or a pair of texts."""
    if image:
        value = values[0]
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if not value:
            return InputError("the image cell is empty.")
        return bytes(value) if isinstance(value, bytes | bytearray) else folder / str(value)
    if all(value in (None, "") for value in values):
        return InputError("the text cell is empty.")
    texts = ["" if value is None else str(value) for value in values]
    return tuple(texts) if len(texts) > 1 else texts[0]


def _exchanged(picture: Any) -> Any:
    """A picture with rows and columns exchanged; an error stays one."""
    if isinstance(picture, InputError):
        return picture
    try:
        with Image.open(BytesIO(picture) if isinstance(picture, bytes) else picture) as found:
            turned = BytesIO()
            found.transpose(Image.Transpose.TRANSPOSE).save(turned, "PNG")
            return turned.getvalue()
    except OSError as error:
        return InputError(f"not a readable image ({error}).")


def open_source(task: SuiteTask, folder: Path, split: str | None, *, image: bool) -> RowSource:
    """Where a task's rows lie; relative paths start from `folder`."""
    if task.dataset is not None:
        return DatasetSource(task, folder, split, image=image)
    path = path_of(task.place(split), folder)
    if task.folder is not None:
        return FolderSource(path, image=image)
    return TableSource(path, task.columns, task.label_column, image=image)
