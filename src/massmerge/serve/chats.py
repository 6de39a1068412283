"""Conversations as clients send them, as the prompt that a model reads."""

from __future__ import annotations

from collections.abc import Sequence

from massmerge.checkpoints.pretrained import in_words
from massmerge.model.routing_model import RoutingModel


def chat_prompt(model: RoutingModel, messages: Sequence[tuple[str, str]]) -> str:
    """The prompt of a conversation: by the base's chat template, or one message a line where it has none.

    Raises:
        InputError: the template does not take such messages.
    """
    tokenizer = model.core.reader.processor
    if not getattr(tokenizer, "chat_template", None):
        return "\n".join(text for _, text in messages)
    given = [{"role": role, "content": text} for role, text in messages]
    with in_words("messages", "conversation"):
        return str(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True))
