"""Texts in answer to prompts: a decoder writes for a mixed batch at once, all else is left to transformers set by set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from massmerge.errors import InputError
from massmerge.model.answers import Generation, Routing
from massmerge.model.core import Core
from massmerge.model.decode import Piece, StepDecoder
from massmerge.model.decode.prompt import steps_alone
from massmerge.model.inputs import Row
from massmerge.model.prompts import NotFinite, Writing
from massmerge.model.second_pass.segments import Segment, Segments, running
from massmerge.model.second_pass.sets import Sets
from massmerge.model.second_pass.updates import SetChanges
from massmerge.model.streams import TextStream, threaded_pieces

_SHARED = ("logits_processor", "stopping_criteria")  # objects that may know of the batch they are called for


class Generator:
    """Generates with some options.

    Args:
        core: the base and what reads prompts.
        sets: the sets that prompts are routed to.
        tasks: those that may be chosen.
        options: those of transformers' `generate`, and `seed` and `logprobs`.

    Raises:
        InputError: the base generates nothing, a task is a classifier, or there is no such option.
    """

    def __init__(self, core: Core, sets: Sets, tasks: list[str], options: dict[str, Any]) -> None:
        self._core, self._sets, self._models = core, sets, sets.language_models
        classifiers = [task for task in tasks if task in core.labels]
        if classifiers:  # such an expert was never trained to write
            raise InputError(f"{', '.join(classifiers)}: answers with labels, not with text. Use `predict`.")
        options = dict(options)
        self._seed, self._logprobs = options.pop("seed", None), options.pop("logprobs", None)
        self._writing = Writing(core.reader, core.base.config, self._models.defaults, options)
        self._alone = steps_alone(self._writing) and not any(name in options for name in _SHARED)
        if self._logprobs is not None and not self._steps:
            raise InputError(
                "log-probabilities are for decoders that write greedily or by sampling. Leave logprobs out."
            )

    @property
    def _steps(self) -> bool:
        """Whether a mixed batch is written step by step; else by transformers' `generate`, set by set."""
        return self._alone and self._models.mixed is not None

    def read(self, prompt: Any) -> Row:
        """A prompt as tensors.

        Raises:
            InputError: it cannot be read, or leaves a decoder no room to write.
        """
        return self._writing.read(prompt)

    def __call__(self, rows: list[Row], routings: list[Routing]) -> list[Generation]:
        """A text for each prompt; none where no set was selected."""
        found = [Generation(None, routing=routing, confidence=routing.confidence) for routing in routings]
        if self._steps:
            for i, pieces in self._stepped(rows, routings).items():
                found[i] = self._joined(pieces, routings[i])
            return found
        for changes, members in self._sets.groups(routings):
            written = self._of_one_set([rows[i] for i in members], [routings[i] for i in members], changes)
            for i, generation in zip(members, written, strict=True):
                found[i] = generation
        return found

    def stream(self, row: Row, routing: Routing) -> TextStream:
        """The text to one prompt, piece by piece; none where no set was selected."""
        config = self._writing.config
        if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
            raise InputError("a stream is one text, written once: leave num_beams and num_return_sequences at 1.")
        groups = self._sets.groups([routing])
        if not groups:
            return TextStream(routing, lambda: iter(()))
        if self._steps:
            return TextStream(routing, lambda: self._texts(row, routing))
        batch, changes = self._batch([row]), groups[0][0]

        def write(streamer: TextIteratorStreamer, stop: StoppingCriteria) -> None:
            """Generate into a streamer until it is stopped."""
            criteria = StoppingCriteriaList([stop, *self._writing.objects.get("stopping_criteria", [])])
            self._generate(batch, changes, {"streamer": streamer, "stopping_criteria": criteria})

        return TextStream(routing, lambda: threaded_pieces(self._core.reader.processor, write))

    # Step by step

    def pieces(self, rows: list[Row], routings: list[Routing]) -> Iterator[tuple[int, Piece]]:
        """The texts of a batch as they are written: the position of a prompt, and what its text grows by.

        What cannot be written step by step comes in one piece.
        """
        if not self._steps:
            for i, one in enumerate(self(rows, routings)):
                yield i, Piece(i, None, one.text or "", end="error" if one.error else "stop", error=one.error)
            return
        decoder = StepDecoder(self._core, self._sets)
        own = [i for i, routing in enumerate(routings) if routing.selected]
        known = {"seed": self._seed, "logprobs": self._logprobs}
        prompts = [decoder.prepared(self._writing, rows[i], routings[i], **known) for i in own]
        places = dict(zip(decoder.admit(prompts), own, strict=True))
        while decoder.running:
            with self._writing.in_words():
                found = decoder.step()
            yield from ((places[piece.id], piece) for piece in found)

    def _texts(self, row: Row, routing: Routing) -> Iterator[str]:
        """What the text to one prompt grows by."""
        for _, piece in self.pieces([row], [routing]):
            if piece.error is not None:
                raise NotFinite(piece.error)
            yield piece.text

    def _stepped(self, rows: list[Row], routings: list[Routing]) -> dict[int, list[Piece]]:
        found: dict[int, list[Piece]] = {}
        for i, piece in self.pieces(rows, routings):
            found.setdefault(i, []).append(piece)
        return found

    def _joined(self, pieces: list[Piece], routing: Routing) -> Generation:
        """All pieces of a text together."""
        if pieces[-1].error is not None:
            return Generation(None, routing=routing, error=pieces[-1].error)
        tokens = [piece.token for piece in pieces if piece.token is not None]
        logprobs = [piece.logprob for piece in pieces if piece.logprob is not None]
        text = self._writing.decode([tokens])[0]
        return Generation(
            routing.selected[0], text, tokens, routing=routing, confidence=routing.confidence, logprobs=logprobs,
            end=pieces[-1].end,
        )  # fmt: skip

    # Set by set

    def _of_one_set(self, rows: list[Row], routings: list[Routing], changes: SetChanges) -> list[Generation]:
        """Texts for prompts that are all routed to the same set."""
        batch = self._batch(rows)
        try:
            tokens = self._generate(batch, changes, {})
        except NotFinite as error:
            if len(rows) == 1:
                return [Generation(None, routing=routings[0], error=str(error))]
            each = zip(rows, routings, strict=True)
            return [self._of_one_set([row], [routing], changes)[0] for row, routing in each]
        count = len(tokens) // len(rows)
        return [self._generation(tokens[i * count : (i + 1) * count], routing) for i, routing in enumerate(routings)]

    def _batch(self, rows: list[Row]) -> dict[str, Tensor]:
        """Prompts as one batch, where the backbone is."""
        return self._writing.prompts(self._core.batch(rows, left=not self._writing.encodes))

    def _generate(self, batch: dict[str, Tensor], changes: SetChanges, more: dict[str, Any]) -> list[list[int]]:
        self._sets.cache.use([changes])
        model = self._models.of(changes)
        count = batch["input_ids"].shape[0]
        with running(Segments((Segment(changes, 0, count),), count)), _seeded(self._seed):
            return self._writing.generate(model, batch, **more)

    def _generation(self, tokens: list[list[int]], routing: Routing) -> Generation:
        first, *others = self._writing.decode(tokens)
        rest = [text for text in others if text is not None]
        return Generation(routing.selected[0], first, tokens[0], rest, routing, confidence=routing.confidence)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Inside, torch draws what follows a seed; outside, what it would have drawn."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
