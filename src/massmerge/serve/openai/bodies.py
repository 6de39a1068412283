"""From what was written to what clients of OpenAI's protocol read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from massmerge.serve.texts import Begun, Token, Written


class Completion:
    """The bodies of one answer: of a conversation, or of a plain prompt.

    Args:
        model: as the client named it.
        begun: how the prompt was routed.
        chat: which of the two.
        logprobs: whether log-probabilities are wanted.
    """

    def __init__(self, model: str, begun: Begun, *, chat: bool, logprobs: bool) -> None:
        self._chat, self._logprobs, self._begun, self._offset = chat, logprobs, begun, 0
        self._object = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "mass": {"task": begun.routing.selected[0], "confidence": begun.routing.confidence},
        }

    def whole(self, written: Sequence[Written]) -> dict[str, Any]:
        """The answer in one body."""
        text = "".join(one.text for one in written)
        tokens = [token for one in written for token in one.tokens]
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}
        choice = self._choice(said, tokens, written[-1].end)
        return {"object": self._object, **self._head, "choices": [choice], "usage": self.usage(written)}

    def first(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, [], None)] if self._chat else []

    def piece(self, written: Written) -> dict[str, Any]:
        """A piece of a stream."""
        said = {"delta": {"content": written.text} if written.text else {}} if self._chat else {"text": written.text}
        return self._chunk(said, written.tokens, written.end)

    def last(self, written: Sequence[Written]) -> dict[str, Any]:
        """What a stream ends with where the usage is asked for."""
        return {"object": self._streamed, **self._head, "choices": [], "usage": self.usage(written)}

    def usage(self, written: Sequence[Written]) -> dict[str, int]:
        """How many tokens were read and written."""
        count = sum(one.count for one in written)
        return {
            "prompt_tokens": self._begun.tokens,
            "completion_tokens": count,
            "total_tokens": self._begun.tokens + count,
        }

    @property
    def _streamed(self) -> str:
        return "chat.completion.chunk" if self._chat else self._object

    def _chunk(self, said: dict[str, Any], tokens: Sequence[Token], end: str | None) -> dict[str, Any]:
        return {"object": self._streamed, **self._head, "choices": [self._choice(said, tokens, end)]}

    def _choice(self, said: dict[str, Any], tokens: Sequence[Token], end: str | None) -> dict[str, Any]:
        found = None
        if self._logprobs and tokens:
            found = _chat_logprobs(tokens) if self._chat else self._plain_logprobs(tokens)
        return {"index": 0, **said, "logprobs": found, "finish_reason": end}

    def _plain_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """As completions have them: one list for each column."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.top) for token in tokens],
            "text_offset": offsets,
        }


def mass_headers(task: str | None, confidence: float | None) -> dict[str, str]:
    """Task and confidence of an answer; names in percent-encoding where they are not plain."""
    headers = {} if task is None else {"X-Mass-Task": quote(task, safe=" ")}
    if confidence is not None:
        headers["X-Mass-Confidence"] = f"{confidence:.4f}"
    return headers


def _chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """As conversations have them: one object for each token."""

    def one(text: str, logprob: float) -> dict[str, Any]:
        """A token with its log probability."""
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {**one(token.text, token.logprob), "top_logprobs": [one(*other) for other in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}
