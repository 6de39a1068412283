"""A prompt that is ready to be written for: its tokens, its set, and what transformers makes of its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, MaxTimeCriteria, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode

from massmerge.errors import InputError
from massmerge.model.answers import Routing
from massmerge.model.decode.pieces import End
from massmerge.model.inputs import Row
from massmerge.model.prompts import Writing
from massmerge.model.second_pass.updates import SetChanges

MOST_LOGPROBS = 20


@dataclass(frozen=True)
class Prompt:
    """A prompt for a `StepDecoder`, which makes it."""

    ids: Tensor
    """(1, tokens), without padding."""
    changes: SetChanges
    """What its selected set changes in the base."""
    routing: Routing
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    sample: bool
    """Whether tokens are drawn instead of the most probable one taken."""
    seed: int | None
    """Of its own random generator; None draws one."""
    logprobs: int | None
    """How many log-probabilities each piece has beside its token's own; None for none at all."""
    stops: tuple[str, ...]
    """Strings that its text ends before."""

    @property
    def task(self) -> str:
        """The best task of its set."""
        return self.routing.selected[0]

    def end(self, ids: Tensor) -> End | None:
        """Why the text ends with these tokens (1, all), if it does."""
        met = [one for one in self.criteria if bool(one(ids, None).all())]
        if not met:
            return None
        return "length" if all(isinstance(one, MaxLengthCriteria | MaxTimeCriteria) for one in met) else "stop"


def steps_alone(writing: Writing) -> bool:
    """Whether a text can be written token by token beside those of other prompts: greedily or by sampling, with a cache.

    All else (beams, assistants, guidance by a second prompt) is left to transformers' own `generate`.
    """
    config = writing.config
    plain = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    return (
        not writing.encodes
        and config.get_generation_mode() in plain
        and (config.num_return_sequences or 1) == 1
        and config.use_cache is not False
        and config.cache_implementation is None
        and (config.guidance_scale or 1) == 1
        and not config.token_healing
    )


def prepare(
    model: PreTrainedModel,
    writing: Writing,
    row: Row,
    routing: Routing,
    changes: SetChanges,
    *,
    seed: int | None,
    logprobs: int | None,
) -> Prompt:
    """A prompt with the processors and criteria that transformers' `generate` would run for it alone.

    Args:
        model: the language model.
        writing: the options.
        row: the prompt as tensors.
        routing: how it was routed.
        changes: its set's.
        seed: of its random generator.
        logprobs: how many log-probabilities are wanted.

    Raises:
        InputError: transformers refuses the options, or there is no such number of log-probabilities.
    """
    if logprobs is not None and not 0 <= logprobs <= MOST_LOGPROBS:
        raise InputError(f"logprobs is a number from 0 to {MOST_LOGPROBS}, or None, not {logprobs!r}.")
    ids = row["input_ids"][row["attention_mask"].bool()][None].to(model.device)
    found: dict[str, Any] = {}

    def note(_: PreTrainedModel, input_ids: Tensor, **made: Any) -> Tensor:
        """In the place of transformers' loop: all that it would be given is ready."""
        found.update(made)
        return input_ids

    with writing.in_words():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=writing.config,
            custom_generate=note,
            **writing.objects,
        )
    config = found["generation_config"]
    return Prompt(
        ids, changes, routing, found["logits_processor"], found["stopping_criteria"], bool(config.do_sample), seed,
        logprobs, writing.stops,
    )  # fmt: skip
