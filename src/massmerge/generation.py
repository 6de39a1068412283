"""Texts in answer to prompts: transformers' own `generate`, on the base with the update of each prompt's selected set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from massmerge.answers import Generation, Routing
from massmerge.errors import InputError, MassError
from massmerge.inputs import Row, positions
from massmerge.runtime import Runtime
from massmerge.subspace.segments import Segment, Segments, running
from massmerge.subspace.updates import SetChanges

NEW_TOKENS = 64
_OBJECTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")  # options that are no plain values
_OURS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")


def checked_options(defaults: GenerationConfig, options: dict[str, Any], model: PretrainedConfig) -> GenerationConfig:
    """A generation configuration with options in it.

    Args:
        defaults: what holds where no option says otherwise.
        options: those of transformers' `generate`.
        model: the base's configuration.

    Raises:
        InputError: there is no such option, or they do not go together.
    """
    config = deepcopy(defaults)
    if config.max_new_tokens is None and config.max_length is None and "max_length" not in options:
        options = {"max_new_tokens": NEW_TOKENS, **options}
    try:
        unknown = [*config.update(**options), *(name for name in options if name in _OURS)]
        config.validate()
    except (ValueError, TypeError) as error:
        raise InputError(f"these generation options do not go together: {error}") from None
    if unknown:
        raise InputError(
            f"generation has no option {', '.join(map(repr, unknown))}. There are those of transformers' "
            "GenerationConfig, such as max_new_tokens, num_beams, do_sample and temperature."
        )
    if config.pad_token_id is None:  # padding is known by the mask; any token will do
        config.pad_token_id = getattr(model, "pad_token_id", None) or 0
    return config


def new_tokens(
    written: Tensor, batch: dict[str, Tensor], config: GenerationConfig, *, encodes: bool
) -> list[list[int]]:
    """What was written, without the prompt or start token before it and the padding behind it."""
    # An encoder-decoder's output begins with its start token, a decoder's with the prompt.
    start = 1 if encodes else batch["input_ids"].shape[1]
    ends = [config.eos_token_id] if isinstance(config.eos_token_id, int) else config.eos_token_id or []
    rows = [row[start:] for row in written.tolist()]
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in rows]


class _NotFinite(MassError):
    """The model's scores for the next token are no numbers."""


class _Finite(LogitsProcessor):
    """Stops where the scores of the next token hold NaN or infinity; what is ruled out has minus infinity."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores as they are."""
        if not bool((scores < torch.inf).all()):
            raise _NotFinite("the output for this prompt holds NaN or infinity, so there is no answer.")
        return scores


class Generator:
    """Generates with some options, the prompts of one selected set at a time.

    Args:
        runtime: the bundle.
        tasks: those that may be chosen.
        options: those of transformers' `generate`.

    Raises:
        InputError: the base generates nothing, a task is a classifier, or there is no such option.
    """

    def __init__(self, runtime: Runtime, tasks: list[str], options: dict[str, Any]) -> None:
        self._runtime, self._models = runtime, runtime.language_models
        classifiers = [task for task in tasks if task in runtime.labels]
        if classifiers:  # such an expert was never trained to write
            raise InputError(f"{', '.join(classifiers)}: answers with labels, not with text. Use `predict`.")
        self._encodes = bool(getattr(runtime.base.config, "is_encoder_decoder", False))
        self._objects = {k: v for k, v in options.items() if k in _OBJECTS}
        plain = {k: v for k, v in options.items() if k not in _OBJECTS}
        self._asked = ", ".join(f"{name}={value!r}" for name, value in plain.items())
        self._config = checked_options(self._models.defaults, plain, runtime.base.config)

    def read(self, prompt: Any) -> Row:
        """A prompt as tensors.

        Raises:
            InputError: it cannot be read, or leaves a decoder no room to write.
        """
        row = self._runtime.reader.row(prompt)
        length, room = row["input_ids"].shape[0], positions(self._runtime.base.config)
        new = self._config.max_new_tokens or max(0, (self._config.max_length or 0) - length)
        if not self._encodes and length + new > room:
            raise InputError(
                f"a prompt of {length} tokens and up to {new} new ones are more than the {room} that the backbone has "
                "positions for. Shorten the prompt, or lower max_new_tokens."
            )
        return row

    def __call__(self, rows: list[Row], routings: list[Routing], changes: SetChanges) -> list[Generation]:
        """A text for each prompt; all of them are routed to the same set."""
        batch = self._batch(rows)
        try:
            written = self._generate(batch, changes, {})
        except _NotFinite as error:
            if len(rows) == 1:
                return [Generation(None, routing=routings[0], error=str(error))]
            return [self([row], [routing], changes)[0] for row, routing in zip(rows, routings, strict=True)]
        tokens = new_tokens(written, batch, self._config, encodes=self._encodes)
        each = len(tokens) // len(rows)
        return [self._generation(tokens[i * each : (i + 1) * each], routing) for i, routing in enumerate(routings)]

    def stream(self, row: Row, routing: Routing, changes: SetChanges | None) -> TextStream:
        """The text to one prompt, piece by piece; none where no set was selected."""
        if (self._config.num_beams or 1) > 1 or (self._config.num_return_sequences or 1) > 1:
            raise InputError("a stream is one text, written once: leave num_beams and num_return_sequences at 1.")
        batch = self._batch([row])

        def write(streamer: TextIteratorStreamer, stop: StoppingCriteria) -> None:
            if changes is None:
                streamer.end()
                return
            criteria = StoppingCriteriaList([stop, *self._objects.get("stopping_criteria", [])])
            self._generate(batch, changes, {"streamer": streamer, "stopping_criteria": criteria})

        return TextStream(routing, self._runtime.reader.processor, write)

    def _batch(self, rows: list[Row]) -> dict[str, Tensor]:
        """Prompts as one batch; a decoder writes on at their right end, so there must be no padding."""
        batch = self._runtime.batch(rows, left=not self._encodes)
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    @torch.inference_mode()
    def _generate(self, batch: dict[str, Tensor], changes: SetChanges, more: dict[str, Any]) -> Tensor:
        self._runtime.cache.use([changes])
        model = self._models.of(changes)
        count = batch["input_ids"].shape[0]
        with running(Segments((Segment(changes, 0, count),), count)):
            try:
                given = {**self._objects, **more}
                checks = LogitsProcessorList([_Finite(), *given.pop("logits_processor", [])])
                tokens: Tensor = model.generate(
                    **batch, generation_config=self._config, logits_processor=checks, **given
                )
            except (ValueError, TypeError, ZeroDivisionError) as error:
                # Much of what is wrong with options shows only at work, such as a temperature of 0.
                if not self._asked:
                    raise
                raise InputError(f"cannot generate with {self._asked}: {error}") from error
        return tokens

    def _generation(self, tokens: list[list[int]], routing: Routing) -> Generation:
        if not self._runtime.reader.has_processor:
            return Generation(routing.selected[0], None, tokens[0], routing=routing)
        first, *others = self._runtime.reader.processor.batch_decode(tokens, skip_special_tokens=True)
        return Generation(routing.selected[0], first, tokens[0], others, routing)


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
