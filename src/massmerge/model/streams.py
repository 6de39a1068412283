"""Texts while they are written, for those who read along."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, TextIteratorStreamer

from massmerge.io.background import Background
from massmerge.model.answers import Routing


class TextStream:
    """A text while it is written: iterate over its pieces. One that is left early is not written to its end.

    Args:
        routing: how the prompt was routed.
        pieces: writes the text, piece by piece.
    """

    def __init__(self, routing: Routing, pieces: Callable[[], Iterator[str]]) -> None:
        self.routing, self._pieces = routing, pieces

    @property
    def task(self) -> str | None:
        """The best task of the selected set; none where the model abstained."""
        return self.routing.selected[0] if self.routing.selected else None

    def __iter__(self) -> Iterator[str]:
        """Pieces of the text, as they come."""
        return (piece for piece in self._pieces() if piece)


def threaded_pieces(tokenizer: Any, write: Callable[[TextIteratorStreamer, StoppingCriteria], object]) -> Iterator[str]:
    """Pieces of a text that transformers' `generate` writes in a thread of its own.

    Args:
        tokenizer: makes text of tokens.
        write: generates into a streamer until done or told to stop.
    """
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    stop = threading.Event()
    faults: list[Exception] = []

    def run() -> None:
        """Write the text, and keep what goes wrong for the reader."""
        try:
            write(streamer, _Told(stop))
        except Exception as error:  # handed to the thread that reads
            faults.append(error)
            streamer.end()

    thread = Background(run, stop.set)
    thread.start()
    try:
        yield from streamer
    finally:
        stop.set()
        thread.join()
    for fault in faults:
        raise fault


class _Told(StoppingCriteria):
    """Stops when an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Whether each text is finished."""
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device, dtype=torch.bool)
