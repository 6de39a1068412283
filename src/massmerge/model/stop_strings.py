"""Stop strings found in the text itself.

transformers' own criterion first compares each string with every token of the vocabulary: minutes for a long one, which a
client of the service may make up anew with each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

_TOKENS_PER_CHARACTER = 4  # at most, in tokenizers of bytes


class StopStrings(StoppingCriteria):
    """Whether the last token of each row has completed a stop string.

    Args:
        processor: the tokenizer.
        stops: the strings; none of them is empty.
    """

    def __init__(self, processor: Any, stops: Sequence[str]) -> None:
        self._processor, self._stops = processor, stops
        self._window = _TOKENS_PER_CHARACTER * max(map(len, stops)) + 1

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """For each row of tokens (rows, length)."""
        found = [self._completed(row) for row in input_ids[:, -self._window :].tolist()]
        return torch.tensor(found, dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]

    def _completed(self, tokens: list[int]) -> bool:
        before, text = self._processor.decode(tokens[:-1]), self._processor.decode(tokens)
        old = next(
            (i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), min(len(before), len(text))
        )
        return any(text.find(stop, max(0, old - len(stop) + 1)) >= 0 for stop in self._stops)
