"""A bundle as a class for batches of columns: `map_batches` of Ray Data, `map` of Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from massmerge.errors import InputError
from massmerge.io.rows import picture
from massmerge.model.load import load

_TEXT, _NUMBERS = ("task", "label", "error"), ("score", "confidence")


class Predictor:
    """Answers batches of a table: each worker makes one, which loads the bundle once.

    Args:
        bundle: the bundle's folder, which every worker must see.
        column: the column that holds the inputs: texts, paths of images, or images as bytes.
        prefix: what the names of the new columns begin with.
        batch_size: inputs that run at once.
        options: those of `Model.predict`, such as `task` and `unknown`.

    Calling it with a batch (columns by name) returns the batch with the columns `task`, `label`, `score`, `confidence` and
    `error` added. An input that cannot be answered has an error and nothing else.
    """

    def __init__(
        self, bundle: str | Path, column: str, *, prefix: str = "", batch_size: int = 32, **options: Any
    ) -> None:
        self._model = load(bundle, check=True)
        self._column, self._prefix, self._options = column, prefix, {**options, "batch_size": batch_size}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with the answers.

        Raises:
            InputError: the batch has no such column, or has columns of the answers' names.
        """
        if self._column not in batch:
            raise InputError(f"no column {self._column!r}; available: {', '.join(map(repr, batch))}.")
        names = {name: f"{self._prefix}{name}" for name in (*_TEXT, *_NUMBERS)}
        taken = sorted(set(names.values()) & set(batch))
        if taken:
            raise InputError(f"the table has {', '.join(taken)} already. Give a prefix.")
        items = [self._item(cell) for cell in batch[self._column]]
        answers = list(self._model.stream(items, on_error="row", top=1, **self._options))
        added: dict[str, Any] = {
            names[name]: np.array([getattr(answer, name) for answer in answers], dtype=object) for name in _TEXT
        }
        for name in _NUMBERS:
            found = [getattr(answer, name) for answer in answers]
            added[names[name]] = np.array([np.nan if value is None else value for value in found], dtype=np.float64)
        return {**batch, **added}

    def _item(self, cell: Any) -> Any:
        if not self._model.takes_images:
            return InputError(f"the column {self._column!r} is empty.") if cell in (None, "") else str(cell)
        return picture(cell, Path())
