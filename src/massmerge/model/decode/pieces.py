"""A text while it is written: what each new token adds to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from massmerge.model.prompts import before_stop

_INCOMPLETE = "\ufffd"  # what a tokenizer gives for the first bytes of a character

End = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Piece:
    """One new token of one prompt."""

    id: int
    """The prompt's number, as `StepDecoder.admit` gave it."""
    token: int | None
    """None where there is no token for want of numbers (`error`)."""
    text: str = ""
    """What the text grows by: nothing while a character is incomplete, or where it may become a stop string."""
    logprob: float | None = None
    """Log-probability of the token before temperature and other options, if it was asked for."""
    top: dict[int, float] = field(default_factory=dict)
    """The most probable tokens with their log-probabilities, as many as were asked for."""
    end: End | None = None
    """Why this is the last piece: an end token or a stop string, the length, or an error."""
    error: str | None = None


class GrowingText:
    """Makes text of tokens as they come; all its pieces together are the text of all tokens, up to a stop string.

    Args:
        decode: gives the text of tokens.
        stops: strings that the text ends before.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._tokens: list[int] = []
        self._given = ""

    def add(self, token: int, *, last: bool) -> str:
        """What the text grows by with one token more; with the last one all that was held back."""
        self._tokens.append(token)
        text = before_stop(self._decode(self._tokens), self._stops)
        if not last:
            text = text.rstrip(_INCOMPLETE)
            text = text[: len(text) - self._may_stop(text)]
        if not text.startswith(self._given):  # some tokenizers tidy blanks up when the next word is there
            return text[len(self._given) :] if last else ""
        piece = text[len(self._given) :]
        self._given = text
        return piece

    def _may_stop(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop string."""
        return max(
            (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
