"""Conversations as clients send them, as the prompt that a model reads."""

from __future__ import annotations

from collections.abc import Sequence

from massmerge.model.routing_model import RoutingModel


def chat_prompt(model: RoutingModel, messages: Sequence[tuple[str, str]]) -> str | list[dict[str, str]]:
    """The prompt of a conversation: its messages, which the base's chat template writes, or a line of each without one."""
    if not getattr(model.tokenizer, "chat_template", None):
        return "\n".join(text for _, text in messages)
    return [{"role": role, "content": text} for role, text in messages]
