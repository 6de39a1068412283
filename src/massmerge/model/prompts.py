"""What every model that writes shares: how prompts are read, and how transformers' `generate` is called on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)

from massmerge.errors import InputError, MassError
from massmerge.model.answers import Generation
from massmerge.model.inputs import CutRow, InputReader, Row, positions
from massmerge.model.stop_strings import StopStrings

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
            f"generation has no option {', '.join(map(repr, unknown))}. Choose from those of transformers' "
            "GenerationConfig, such as max_new_tokens, num_beams, do_sample and temperature."
        )
    if config.pad_token_id is None:  # padding is known by the mask; any token will do
        config.pad_token_id = getattr(model, "pad_token_id", None) or 0
    return config


NOT_FINITE = "the output for this prompt holds NaN or infinity, so there is no answer."


class NotFinite(MassError):
    """The model's scores for the next token are no numbers."""


class _Finite(LogitsProcessor):
    """Stops where the scores of the next token hold NaN or infinity; what is ruled out has minus infinity."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores as they are."""
        if not bool((scores < torch.inf).all()):
            raise NotFinite(NOT_FINITE)
        return scores


class Writing:
    """Reads prompts and generates with some options, whatever model it is given.

    Args:
        reader: makes tensors of prompts, and text of tokens.
        model: the configuration of the models.
        defaults: how they generate where no option says otherwise.
        options: those of transformers' `generate`.

    Raises:
        InputError: there is no such option, or they do not go together.
    """

    def __init__(
        self, reader: InputReader, model: PretrainedConfig, defaults: GenerationConfig, options: Mapping[str, Any]
    ) -> None:
        self.reader, self._room = reader, positions(model)
        self.encodes = bool(getattr(model, "is_encoder_decoder", False))
        self.objects = {k: v for k, v in options.items() if k in _OBJECTS}
        self._calls_others = bool(self.objects)
        plain = {k: v for k, v in options.items() if k not in _OBJECTS}
        self._asked = ", ".join(f"{name}={value!r}" for name, value in plain.items())
        self.config = checked_options(defaults, plain, model)
        self.stops = self._stop_strings()

    def _stop_strings(self) -> tuple[str, ...]:
        """The strings that texts end before: no longer an option, for which `generate` would ask for the tokenizer."""
        found = self.config.stop_strings or ()
        stops = (found,) if isinstance(found, str) else tuple(found)
        self.config.stop_strings = None
        if stops:
            if not all(isinstance(stop, str) and stop for stop in stops):
                raise InputError(f"stop_strings are texts of at least one character, not {found!r}.")
            if not self.reader.has_processor:
                raise InputError("stop_strings need a tokenizer, which the base lacks.")
            own = StopStrings(self.reader.processor, stops)
            self.objects["stopping_criteria"] = StoppingCriteriaList([own, *self.objects.get("stopping_criteria", [])])
        return stops

    def read(self, prompt: Any) -> Row:
        """A prompt as tensors.

        Raises:
            InputError: it cannot be read, or leaves a decoder no room to write.
        """
        row = self.reader.row(prompt)
        length, room = row["input_ids"].shape[0], self._room
        if isinstance(row, CutRow) and not self.encodes:  # or a decoder would go on from the middle of the prompt
            length, room = row.length, min(length, room)
        new = self.config.max_new_tokens or max(0, (self.config.max_length or 0) - length)
        if not self.encodes and length + new > room:
            raise InputError(
                f"a prompt of {length} tokens and up to {new} new ones are more than the {room} that the backbone and its "
                "tokenizer take. Shorten the prompt, or lower max_new_tokens."
            )
        return row

    def batch(self, rows: list[Row]) -> dict[str, Tensor]:
        """Prompts as one batch; a decoder writes on at their right end, so there must be no padding."""
        return self.prompts(self.reader.batch(rows, left=not self.encodes))

    def prompts(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `generate` takes of a batch."""
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    @torch.inference_mode()
    def generate(self, model: PreTrainedModel, batch: dict[str, Tensor], **more: Any) -> list[list[int]]:
        """New tokens for each prompt of a batch; several texts of one prompt follow each other.

        Args:
            model: a language model.
            batch: as `batch` makes it.
            more: objects for transformers' `generate`, such as a streamer.
        """
        given = {**self.objects, **more}
        checks = LogitsProcessorList([_Finite(), *given.pop("logits_processor", [])])
        with self.in_words():
            written: Tensor = model.generate(**batch, generation_config=self.config, logits_processor=checks, **given)
        # An encoder-decoder's output begins with its start token, a decoder's with the prompt.
        start = 1 if self.encodes else batch["input_ids"].shape[1]
        ends = self.config.eos_token_id
        ends = [ends] if isinstance(ends, int) else ends or []
        rows = [row[start:] for row in written.tolist()]
        return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in rows]

    @contextmanager
    def in_words(self) -> Iterator[None]:
        """Much of what is wrong with options, or with the base's configuration, shows only at work, and in all ways."""
        try:
            yield
        except (MassError, OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._calls_others:  # what a caller's own function raises is the caller's
                raise
            asked = self._asked or "the base's generation_config.json"
            raise InputError(f"cannot generate with {asked}: {type(error).__name__}: {error}") from error

    def decode(self, tokens: Sequence[list[int]]) -> list[str | None]:
        """Texts of tokens, up to a stop string; none without a tokenizer."""
        if not self.reader.has_processor:
            return [None] * len(tokens)
        return [before_stop(self.reader.text(own), self.stops) for own in tokens]

    def texts(self, rows: list[Row], generate: Callable[[dict[str, Tensor]], list[list[int]]]) -> list[Generation]:
        """A text for each prompt, which names no task.

        Args:
            rows: the prompts as tensors.
            generate: new tokens for a batch.
        """
        tokens = generate(self.batch(rows))
        firsts = tokens[:: len(tokens) // len(rows)]
        return [Generation(None, text, own) for text, own in zip(self.decode(firsts), firsts, strict=True)]


def before_stop(text: str, stops: Sequence[str]) -> str:
    """A text up to the first stop string.

    >>> before_stop("yes. Next: no", ["Next", "No"])
    'yes. '
    """
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
