"""Conversations as clients send them, as the prompt that a model routes."""

from __future__ import annotations

from collections.abc import Sequence

from massmerge.model.routing_model import RoutingModel

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


def chat_prompt(model: RoutingModel, messages: Sequence[tuple[str, str]]) -> list[dict[str, str]] | str:
    """What is routed of a conversation: messages for the base's chat template, or one a line where it has none.

    What tools say is left out, and so is the beginning of an answer that is to be gone on with: templates differ in
    whether they take them, and an upstream may well do so.
    """
    kept = [(_ROLES[role], text) for role, text in messages if role in _ROLES]
    while kept and kept[-1][0] == "assistant":
        kept.pop()
    if not kept or not getattr(model.core.reader.processor, "chat_template", None):
        return "\n".join(text for _, text in messages)
    return [{"role": role, "content": text} for role, text in kept]
