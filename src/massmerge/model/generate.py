"""Texts in answer to prompts: transformers' own `generate`, on the base with the update of each prompt's selected set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from massmerge.errors import InputError
from massmerge.model.answers import Generation, Routing
from massmerge.model.core import Core
from massmerge.model.inputs import Row
from massmerge.model.prompts import NotFinite, Writing
from massmerge.model.second_pass.segments import Segment, Segments, running
from massmerge.model.second_pass.sets import Sets
from massmerge.model.second_pass.updates import SetChanges


class Generator:
    """Generates with some options, the prompts of one selected set at a time.

    Args:
        core: the base and what reads prompts.
        sets: the sets that prompts are routed to.
        tasks: those that may be chosen.
        options: those of transformers' `generate`.

    Raises:
        InputError: the base generates nothing, a task is a classifier, or there is no such option.
    """

    def __init__(self, core: Core, sets: Sets, tasks: list[str], options: dict[str, Any]) -> None:
        self._core, self._sets, self._models = core, sets, sets.language_models
        classifiers = [task for task in tasks if task in core.labels]
        if classifiers:  # such an expert was never trained to write
            raise InputError(f"{', '.join(classifiers)}: answers with labels, not with text. Use `predict`.")
        self._writing = Writing(core.reader, core.base.config, self._models.defaults, options)

    def read(self, prompt: Any) -> Row:
        """A prompt as tensors.

        Raises:
            InputError: it cannot be read, or leaves a decoder no room to write.
        """
        return self._writing.read(prompt)

    def __call__(self, rows: list[Row], routings: list[Routing], changes: SetChanges) -> list[Generation]:
        """A text for each prompt; all of them are routed to the same set."""
        batch = self._batch(rows)
        try:
            tokens = self._generate(batch, changes, {})
        except NotFinite as error:
            if len(rows) == 1:
                return [Generation(None, routing=routings[0], error=str(error))]
            return [self([row], [routing], changes)[0] for row, routing in zip(rows, routings, strict=True)]
        each = len(tokens) // len(rows)
        return [self._generation(tokens[i * each : (i + 1) * each], routing) for i, routing in enumerate(routings)]

    def stream(self, row: Row, routing: Routing, changes: SetChanges | None) -> TextStream:
        """The text to one prompt, piece by piece; none where no set was selected."""
        config = self._writing.config
        if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
            raise InputError("a stream is one text, written once: leave num_beams and num_return_sequences at 1.")
        batch = self._batch([row])

        def write(streamer: TextIteratorStreamer, stop: StoppingCriteria) -> None:
            if changes is None:
                streamer.end()
                return
            criteria = StoppingCriteriaList([stop, *self._writing.objects.get("stopping_criteria", [])])
            self._generate(batch, changes, {"streamer": streamer, "stopping_criteria": criteria})

        return TextStream(routing, self._core.reader.processor, write)

    def _batch(self, rows: list[Row]) -> dict[str, Tensor]:
        """Prompts as one batch, where the backbone is."""
        return self._writing.prompts(self._core.batch(rows, left=not self._writing.encodes))

    def _generate(self, batch: dict[str, Tensor], changes: SetChanges, more: dict[str, Any]) -> list[list[int]]:
        self._sets.cache.use([changes])
        model = self._models.of(changes)
        count = batch["input_ids"].shape[0]
        with running(Segments((Segment(changes, 0, count),), count)):
            return self._writing.generate(model, batch, **more)

    def _generation(self, tokens: list[list[int]], routing: Routing) -> Generation:
        first, *others = self._writing.decode(tokens)
        rest = [text for text in others if text is not None]
        return Generation(routing.selected[0], first, tokens[0], rest, routing, confidence=routing.confidence)


class TextStream:
    """A text while it is written: iterate over its pieces. One that is left early is not written to its end.

    Args:
        routing: how the prompt was routed.
        tokenizer: makes text of tokens.
        write: generates into a streamer until done or told to stop; runs in a thread of its own.
    """

    def __init__(
        self, routing: Routing, tokenizer: Any, write: Callable[[TextIteratorStreamer, StoppingCriteria], None]
    ) -> None:
        self.routing = routing
        self._streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write
        self._stop = threading.Event()
        self._fault: Exception | None = None

    @property
    def task(self) -> str | None:
        """The best task of the selected set; none where the model abstained."""
        return self.routing.selected[0] if self.routing.selected else None

    def __iter__(self) -> Iterator[str]:
        """Pieces of the text, as they come."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield from (piece for piece in self._streamer if piece)
        finally:
            self._stop.set()
            thread.join()
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        try:
            self._write(self._streamer, _Told(self._stop))
        except Exception as error:  # handed to the thread that reads
            self._fault = error
            self._streamer.end()


class _Told(StoppingCriteria):
    """Stops when an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Whether each text is finished."""
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device, dtype=torch.bool)
