"""Texts that one model writes step by step, each for its own reader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from massmerge.errors import DamageError, InputError, MassError
from massmerge.model.answers import Routing
from massmerge.model.decode import Piece
from massmerge.model.generative import Generative
from massmerge.model.inputs import CutRow, positions
from massmerge.routing.sessions import Sessions
from massmerge.serve.errors import ServiceError
from massmerge.serve.logs import without_values

log = logging.getLogger("massmerge.serve")
_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True)
class Ask:
    """A prompt, and how its answer is to be written."""

    prompt: Any
    """A text, messages, or ready tokens."""
    task: str | None = None
    """Where it is given."""
    most: int = 64
    """New tokens at most."""
    fitting: bool = False
    """Whether fewer will do where the base has no room for so many."""
    seed: int | None = None
    logprobs: int | None = None
    """How many of the most probable tokens are wanted beside each one's own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of transformers' `generate`."""
    session: str | None = None
    """A key of the conversation, whose prompts share evidence of their task."""


@dataclass(frozen=True)
class Begun:
    """A prompt that is being answered."""

    routing: Routing
    tokens: int
    """Of the prompt."""


@dataclass(frozen=True)
class Token:
    """A token's text with its log-probability, and those of the most probable ones in its place."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Written:
    """What a text grows by."""

    text: str
    count: int
    """Of tokens."""
    tokens: tuple[Token, ...] = ()
    """If their log-probabilities are wanted."""
    end: str | None = None
    """Why the text ends here: `stop` or `length`."""


class Steps(Protocol):
    """What `StepDecoder` does."""

    def prompt(self, prompt: Any, routing: Routing, *, seed: int | None, logprobs: int | None, **options: Any) -> Any:
        """A prompt that is ready to be admitted."""

    def admit(self, prompts: Sequence[Any]) -> list[int]:
        """Let prompts join; their numbers."""

    def finish(self, number: int) -> None:
        """Take a prompt out."""

    def step(self) -> list[Piece]:
        """What texts grow by."""


class Texts(Generic[_K]):
    """The texts that a model is writing, by their readers.

    Args:
        model: a model that writes.
        sessions: where the sessions of prompts are remembered.
    """

    def __init__(self, model: Generative, sessions: Sessions) -> None:
        self._model, self._sessions = model, sessions
        try:
            self._steps: Steps = model.decoder()
        except InputError:  # an encoder-decoder
            self._steps = _WholeTexts(model)
        self._readers: dict[int, _K] = {}
        self._logprobs: set[int] = set()

    @property
    def running(self) -> list[_K]:
        """Readers of the texts that are not at their end."""
        return list(self._readers.values())

    def join(self, asked: Sequence[tuple[_K, Ask]]) -> Iterator[tuple[_K, Begun | ServiceError]]:
        """Begin texts at the next step; how each prompt was routed, or why it cannot be answered."""
        rows = [_or_error(partial(self._model.read, ask.prompt)) for _, ask in asked]
        pairs = zip((ask for _, ask in asked), rows, strict=True)
        free = [(row, ask.session) for ask, row in pairs if ask.task is None and isinstance(row, dict)]
        routings = iter(self._routings(free))
        for (key, ask), row in zip(asked, rows, strict=True):
            if isinstance(row, ServiceError):
                yield key, row
                continue
            routing = next(routings) if ask.task is None else _given(ask.task)
            yield key, routing if isinstance(routing, ServiceError) else self._begin(key, ask, row, routing)

    def _routings(self, asked: list[tuple[Any, str | None]]) -> list[Routing | ServiceError]:
        """Routings of prompts, each with its session, in one batch; if they cannot run together, of each by itself."""
        if not asked:
            return []
        rows, keys = [row for row, _ in asked], [key for _, key in asked]
        known: dict[str, Any] = {"session": keys, "memory": self._sessions} if any(keys) else {}
        found = _or_error(lambda: self._model.route(rows, batch_size=len(rows), **known))
        if isinstance(found, list):
            return found
        return [found] if len(asked) == 1 else [one for each in asked for one in self._routings([each])]

    def _begin(self, key: _K, ask: Ask, row: Any, routing: Routing) -> Begun | ServiceError:
        if not routing.selected:
            return ServiceError(400, "no_task", "No task fits this prompt. Name one as the model.", param="model")
        if isinstance(row, CutRow):
            message = "The prompt has more tokens than the base takes. Shorten it."
            return ServiceError(400, "context_length_exceeded", message)
        length = int(row["input_ids"].shape[0])
        room = positions(self._model.core.base.config) - length
        most = max(1, min(ask.most, room)) if ask.fitting else ask.most
        options = {**ask.options, "max_new_tokens": most}
        prompt = _or_error(lambda: self._steps.prompt(row, routing, seed=ask.seed, logprobs=ask.logprobs, **options))
        if isinstance(prompt, ServiceError):
            return prompt
        number = self._steps.admit([prompt])[0]
        self._readers[number] = key
        if ask.logprobs is not None:
            self._logprobs.add(number)
        return Begun(routing, length)

    def leave(self, key: _K) -> None:
        """Write no further for a reader."""
        for number in [number for number, own in self._readers.items() if own is key]:
            self._steps.finish(number)
            self._forget(number)

    def step(self) -> Iterator[tuple[_K, Written | ServiceError]]:
        """What each text grows by."""
        for piece in self._steps.step():
            reader = self._readers[piece.id]
            wanted = piece.id in self._logprobs
            if piece.end is not None:
                self._forget(piece.id)
            if piece.end == "error":
                yield reader, ServiceError(400, "unanswerable", piece.error or "there is no answer.")
            else:
                yield reader, self._written(piece, wanted=wanted)

    def _written(self, piece: Piece, *, wanted: bool) -> Written:
        count = piece.count if isinstance(piece, _Whole) else 1
        tokens: tuple[Token, ...] = ()
        if wanted and piece.token is not None and piece.logprob is not None:
            top = tuple((self._text(token), value) for token, value in piece.top.items())
            tokens = (Token(self._text(piece.token), piece.logprob, top),)
        return Written(piece.text, count, tokens, piece.end)

    def _text(self, token: int) -> str:
        return str(self._model.core.reader.processor.decode([token]))

    def _forget(self, number: int) -> None:
        del self._readers[number]
        self._logprobs.discard(number)


@dataclass(frozen=True)
class _Whole(Piece):
    """A whole text of so many tokens."""

    count: int = 0


class _WholeTexts:
    """The texts of a base that is no decoder: one step writes one text to its end."""

    def __init__(self, model: Generative) -> None:
        self._model = model
        self._waiting: dict[int, tuple[Any, Routing, int | None, dict[str, Any]]] = {}
        self._number = 0

    def prompt(self, prompt: Any, routing: Routing, *, seed: int | None, logprobs: int | None, **options: Any) -> Any:
        """A prompt that is ready to be admitted."""
        if logprobs is not None:
            raise InputError("log-probabilities are given by decoders only: leave logprobs out.")
        return prompt, routing, seed, options

    def admit(self, prompts: Sequence[Any]) -> list[int]:
        """Let prompts join; their numbers."""
        first = self._number
        for prompt in prompts:
            self._waiting[self._number] = prompt
            self._number += 1
        return list(range(first, self._number))

    def finish(self, number: int) -> None:
        """Take a prompt out."""
        self._waiting.pop(number, None)

    def step(self) -> list[Piece]:
        """The text to the prompt that has waited for the longest."""
        number = next(iter(self._waiting))
        prompt, routing, seed, options = self._waiting.pop(number)
        try:
            with torch.random.fork_rng(devices=[]):
                if seed is not None:
                    torch.manual_seed(seed)
                found = self._model.write([prompt], [routing], **options)[0]
        except InputError as error:
            return [_Whole(number, None, end="error", error=str(error))]
        if found.error:
            return [_Whole(number, None, end="error", error=found.error)]
        end = "length" if len(found.tokens) >= options["max_new_tokens"] else "stop"
        return [_Whole(number, found.tokens[-1], found.text or "", end=end, count=len(found.tokens))]  # type: ignore[arg-type]


def _given(task: str) -> Routing:
    return Routing({}, {task: 1.0}, [task], "none: the task was given")


def _or_error(function: Callable[[], Any]) -> Any:
    """What a function gives, or the error in its place; damage is raised, for it concerns all texts."""
    try:
        return function()
    except DamageError:
        raise
    except MassError as error:
        return ServiceError(400, "invalid" if isinstance(error, InputError) else "unanswerable", str(error))
    except BaseException as error:
        # Of a library, at something odd in the prompt; a panic of one that is written in Rust is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        log.error("a prompt could not be answered", extra={"fault": without_values(error)})
        return ServiceError(500, "internal", "The prompt could not be answered because of an internal error.")
