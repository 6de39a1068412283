"""What the batching thread does: items become rows of tensors, rows become answers, and a bad one fails alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from massmerge.errors import DamageError, InputError
from massmerge.model.answers import Prediction
from massmerge.model.inputs import CutRow
from massmerge.model.model import Model
from massmerge.model.routing_model import RoutingModel
from massmerge.routing.sessions import Sessions
from massmerge.serve.batching import BatchKey, Fault
from massmerge.serve.chats import chat_prompt
from massmerge.serve.images import decode_base64, open_image
from massmerge.serve.logs import without_values

log = logging.getLogger("massmerge.serve")
INTERNAL = Fault("internal", "The input could not be answered because of an internal error.")


@dataclass(frozen=True)
class SentText:
    """A text, or a pair of them."""

    text: str
    pair: str | None = None


@dataclass(frozen=True)
class SentImage:
    """An image as it was sent: the bytes of its file, or those bytes as base64 or data URL."""

    data: bytes | str


@dataclass(frozen=True)
class SentChat:
    """A conversation: role and text of each message."""

    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SentTokens:
    """A text as the tokens of the base."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Read:
    """An input that has been read already, by this model."""

    row: Any
    model: RoutingModel
    given: Item


@dataclass(frozen=True)
class InSession:
    """An input of a request that names its session."""

    item: Item | Read | Fault
    session: str


Item = str | SentText | SentImage | SentChat | SentTokens
"""A bare string is what the model takes: a text, or an image as base64."""


class Worker:
    """Answers batches with the model of the moment.

    Args:
        model: gives the model; a reload changes what it gives.
        max_text: characters of one text.
        max_pixels: pixels of one image.
        sessions: where the sessions of requests are remembered.
    """

    def __init__(
        self, model: Callable[[], RoutingModel], *, max_text: int, max_pixels: int, sessions: Sessions | None = None
    ) -> None:
        self._model, self._max_text, self._max_pixels = model, max_text, max_pixels
        self._sessions = Sessions() if sessions is None else sessions

    def __call__(
        self, items: Sequence[Item | Read | Fault | InSession], choice: BatchKey, top: int
    ) -> list[Prediction | Fault]:
        """An answer or a fault for each item."""
        model = self._model()
        keys = [item.session if isinstance(item, InSession) else None for item in items]
        found = [self._row(item.item if isinstance(item, InSession) else item, model) for item in items]
        rows = [(one.row, key) for one, key in zip(found, keys, strict=True) if isinstance(one, Read)]
        answers = iter(self._predict(model, rows, choice, top))
        return [one if isinstance(one, Fault) else next(answers) for one in found]

    def _row(self, item: Item | Read | Fault, model: RoutingModel) -> Read | Fault:
        if isinstance(item, Fault) or (isinstance(item, Read) and item.model is model):
            return item
        given = item.given if isinstance(item, Read) else item
        return self.read(given, self.open(given, model), model)

    def open(self, item: Item, model: RoutingModel) -> Any:
        """What the model reads; of an image the header alone is decoded. A fault if it is nothing for this model."""
        return _or_fault(lambda: self._open(item, model))

    def read(self, item: Item, opened: Any, model: RoutingModel) -> Read | Fault:
        """What was opened, as a row of tensors."""
        found = opened if isinstance(opened, Fault) else _or_fault(lambda: Read(model.read(opened), model, item))
        assert isinstance(found, Read | Fault)
        return found

    def _open(self, item: Item, model: RoutingModel) -> Any:
        if isinstance(item, str):
            item = SentImage(item) if model.takes_images else SentText(item)
        if isinstance(item, SentText):
            if model.takes_images:
                raise InputError("this model takes images, not text.")
            return self._text(item)
        if isinstance(item, SentChat | SentTokens):
            return self._conversation(item, model)
        if not model.takes_images:
            raise InputError("this model takes text, not images.")
        data = decode_base64(item.data) if isinstance(item.data, str) else item.data
        return open_image(data, self._max_pixels)

    def _text(self, item: SentText) -> str | tuple[str, str]:
        if max(len(item.text), len(item.pair or "")) > self._max_text:
            raise InputError(f"the text has more than {self._max_text:,} characters. Split it.")
        return item.text if item.pair is None else (item.text, item.pair)

    def _conversation(self, item: SentChat | SentTokens, model: RoutingModel) -> Any:
        if model.takes_images:
            raise InputError("this model takes images, not text.")
        if isinstance(item, SentTokens):
            return {"input_ids": torch.tensor(item.tokens)}
        if not item.messages:
            raise InputError("there is no text in the messages.")
        if sum(len(text) for _, text in item.messages) > self._max_text:
            raise InputError(f"the messages have more than {self._max_text:,} characters together. Shorten them.")
        return chat_prompt(model, item.messages)

    def _predict(
        self, model: RoutingModel, rows: list[tuple[Any, str | None]], choice: BatchKey, top: int
    ) -> list[Prediction | Fault]:
        """Answers to rows, each with its session, in one batch; if they cannot run together, to each by itself."""
        if not rows:
            return []
        tasks = None if choice.tasks is None else list(choice.tasks)
        try:
            options: dict[str, Any] = {"route": choice.route, "top": top, "batch_size": len(rows), "on_error": "row"}
            if any(key is not None for _, key in rows):
                options |= {"session": [key for _, key in rows], "memory": self._sessions}
            if choice.only_route:
                return _routes(model, [row for row, _ in rows], tasks, options)
            found = cast(Model, model).predict([row for row, _ in rows], task=tasks, **options)
            return [Fault("unanswerable", answer.error) if answer.error else answer for answer in found]
        except DamageError:
            raise
        except Exception as error:
            if len(rows) > 1:
                return [result for row in rows for result in self._predict(model, [row], choice, top)]
            if isinstance(error, InputError):
                return [Fault("invalid", str(error))]
            log.error("an input could not be answered", extra={"fault": without_values(error)})
            return [INTERNAL]


def _routes(
    model: RoutingModel, rows: list[Any], tasks: list[str] | None, options: dict[str, Any]
) -> list[Prediction | Fault]:
    """The task of each row as an answer without a label."""
    kept = {name: options[name] for name in ("session", "memory") if name in options}
    found: list[Prediction | Fault] = []
    for row, routing in zip(rows, model.route(rows, task=tasks, batch_size=len(rows), **kept), strict=True):
        if not all(map(math.isfinite, routing.weights.values())):
            found.append(Fault("unanswerable", "routing gives NaN or infinity for this input, so there is no task."))
            continue
        best = routing.selected[0] if routing.selected else None
        cut = isinstance(row, CutRow)
        found.append(Prediction(best, confidence=routing.confidence, routing=routing, truncated=cut))
    return found


def _or_fault(function: Callable[[], Any]) -> Any:
    """What a function gives; a fault where the input is to blame."""
    try:
        return function()
    except InputError as error:
        return Fault("unreadable", str(error))
    except BaseException as error:
        # Of a tokenizer or image library, at something odd in the input; a panic of one that is written in Rust is no
        # Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        log.warning("an input could not be read", extra={"fault": without_values(error)})
        return Fault("unreadable", "the input cannot be read.")
