"""Conversations: messages with roles, as the base's own chat template writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from massmerge.errors import InputError

Message = Mapping[str, Any]
_NO_TEMPLATE = (
    "the base's tokenizer has no chat template, so it cannot read messages. Give the prompt as text, or merge on a base "
    "that was trained to chat (its tokenizer_config.json or chat_template.jinja holds the template)."
)


def is_message(item: Any) -> bool:
    """Whether something is one message: a mapping with a role."""
    return isinstance(item, Mapping) and "role" in item


def is_conversation(item: Any) -> bool:
    """Whether something is a list of messages."""
    return isinstance(item, list | tuple) and bool(item) and all(is_message(one) for one in item)


def prompts_of(prompts: Any, messages: Sequence[Any] | None) -> Any:
    """What was given of the two.

    Args:
        prompts: texts, conversations or other inputs.
        messages: one conversation, or several.

    Raises:
        InputError: both, neither, or messages that are none.
    """
    if (prompts is None) == (messages is None):
        raise InputError("give prompts or messages, one of them.")
    if messages is None:
        return prompts
    if is_conversation(messages) or (messages and all(is_conversation(one) for one in messages)):
        return messages
    raise InputError('messages is a list of mappings with a role: [{"role": "user", "content": "…"}].')


def render(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The prompt of a conversation, ready for the answer; special tokens stand in it, so none may be added to it.

    Args:
        tokenizer: the base's.
        messages: mappings of `role` and `content`, the last one not the assistant's.

    Raises:
        InputError: there is no chat template, or it does not take such messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(_NO_TEMPLATE)
    plain = [{**message, "content": _words(message)} for message in messages]
    if plain[-1]["role"] == "assistant":
        raise InputError("the last message is the assistant's: end with what it is to answer.")
    try:
        text: str = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of whoever made the base
        raise InputError(f"the base's chat template does not take these messages: {error}") from None
    return text


def last_turn(messages: Sequence[Message]) -> list[Message] | None:
    """What a user said last, behind the system prompt; none where the conversation is no more than that."""
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if len(users) < 2:
        return None
    system = [message for message in messages[: users[0]] if message["role"] in ("system", "developer")]
    return [*system, *messages[users[-1] :]]


def empty_prompt(tokenizer: Any) -> str | None:
    """What the chat template writes around a message that says nothing; none without a template that takes one."""
    try:
        return render(tokenizer, [{"role": "user", "content": ""}])
    except InputError:
        return None


def _words(message: Message) -> str:
    """The content of a message: text, or a list of parts with text."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"a message's content is text; that of the {message['role']!r} message is not.")
    return "".join(map(str, texts))
