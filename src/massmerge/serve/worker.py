"""What the batching thread does: items become rows of tensors, rows become answers, and a bad one fails alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from massmerge.answers import Prediction
from massmerge.errors import InputError
from massmerge.model import Model
from massmerge.serve.batching import Choice, Fault
from massmerge.serve.images import decode_base64, open_image
from massmerge.serve.logs import without_values

log = logging.getLogger("massmerge.serve")
INTERNAL = Fault("internal", "The input could not be answered because of a fault of the service.")


@dataclass(frozen=True)
class Text:
    """A text, or a pair of them."""

    text: str
    pair: str | None = None


@dataclass(frozen=True)
class Picture:
    """An image as it was sent: the bytes of its file, or those bytes as base64 or data URL."""

    data: bytes | str


Item = str | Text | Picture
"""A bare string is what the model takes: a text, or an image as base64."""


class Worker:
    """Answers batches with the model of the moment.

    Args:
        model: gives the model; a reload changes what it gives.
        max_text: characters of one text.
        max_pixels: pixels of one image.
    """

    def __init__(self, model: Callable[[], Model], *, max_text: int, max_pixels: int) -> None:
        self._model, self._max_text, self._max_pixels = model, max_text, max_pixels

    def __call__(self, items: Sequence[Item], choice: Choice, top: int) -> list[Prediction | Fault]:
        """An answer or a fault for each item."""
        model = self._model()
        results: list[Prediction | Fault | None] = [None] * len(items)
        rows: dict[int, Any] = {}
        for index, item in enumerate(items):
            try:
                rows[index] = model.read(self._open(item, model))
            except InputError as error:
                results[index] = Fault("unreadable", str(error))
            except Exception as error:  # of a tokenizer or image library, at something odd in the input
                log.warning("an input could not be read", extra={"fault": without_values(error)})
                results[index] = Fault("unreadable", "the input cannot be read.")
        for index, result in zip(rows, self._predict(model, list(rows.values()), choice, top), strict=True):
            results[index] = result
        return [INTERNAL if result is None else result for result in results]

    def _open(self, item: Item, model: Model) -> Any:
        if isinstance(item, str):
            item = Picture(item) if model.takes_images else Text(item)
        if isinstance(item, Text):
            if model.takes_images:
                raise InputError("this model takes images, not text.")
            return self._text(item)
        if not model.takes_images:
            raise InputError("this model takes text, not images.")
        data = decode_base64(item.data) if isinstance(item.data, str) else item.data
        return open_image(data, self._max_pixels)

    def _text(self, item: Text) -> str | tuple[str, str]:
        if max(len(item.text), len(item.pair or "")) > self._max_text:
            raise InputError(f"text of more than {self._max_text:,} characters. Split it.")
        return item.text if item.pair is None else (item.text, item.pair)

    def _predict(self, model: Model, rows: list[Any], choice: Choice, top: int) -> list[Prediction | Fault]:
        """Answers to rows in one batch; if they cannot run together, to each by itself."""
        if not rows:
            return []
        tasks = None if choice.tasks is None else list(choice.tasks)
        try:
            options: dict[str, Any] = {"route": choice.route, "top": top, "batch_size": len(rows), "on_error": "row"}
            found = model.predict(rows, task=tasks, **options)
            return [Fault("unanswerable", answer.error) if answer.error else answer for answer in found]
        except Exception as error:
            if len(rows) > 1:
                return [result for row in rows for result in self._predict(model, [row], choice, top)]
            if isinstance(error, InputError):
                return [Fault("invalid", str(error))]
            log.error("an input could not be answered", extra={"fault": without_values(error)})
            return [INTERNAL]
