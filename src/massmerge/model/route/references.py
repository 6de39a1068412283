"""Inputs that belong to no task: what a task's subspace holds of them by chance is no reason to choose it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from massmerge.checkpoints.backbone import language_class
from massmerge.checkpoints.pretrained import pretrained_tokenizer
from massmerge.errors import InputError
from massmerge.model.chat import empty_prompt

Batch = dict[str, Tensor]


def is_decoder(model: PreTrainedModel) -> bool:
    """Whether a model writes on from its prompt, so that its last token has seen all of it."""
    return language_class(model.config) is not None and not getattr(model.config, "is_encoder_decoder", False)


def random_words(model: PreTrainedModel) -> Batch:
    """Texts of no task: 16 of four tokens, as chosen on validation rows (docs/research/routing.md)."""
    vocabulary = max(1, getattr(model.config, "vocab_size", 4))
    ids = torch.randint(vocabulary, (16, 4), generator=torch.Generator().manual_seed(0)).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def empty_prompt_of(model: PreTrainedModel, processor: Path, *, template: bool = True) -> Batch | None:
    """A prompt that asks for nothing: the chat template around an empty message, or a newline; none without a tokenizer.

    Args:
        model: runs the first pass.
        processor: the bundle's folder of the tokenizer.
        template: whether prompts are written by the chat template, where the tokenizer has one.
    """
    try:
        tokenizer = pretrained_tokenizer(processor)
    except InputError:
        return None  # ready tensors are all that such a bundle takes
    chat = empty_prompt(tokenizer) if template else None
    tokens = tokenizer("\n" if chat is None else chat, add_special_tokens=chat is None)["input_ids"]
    if not tokens or max(tokens) >= model.config.vocab_size:
        return None
    ids = torch.tensor([tokens], device=model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
