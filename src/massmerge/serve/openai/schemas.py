"""What clients of OpenAI's protocol send and read."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from massmerge.serve.schemas import Message, SessionKey

_NEUTRAL = "Only its default is supported."


class StreamOptions(BaseModel):
    """What a stream ends with."""

    include_usage: bool = False


class WritingOptions(BaseModel):
    """How a text is written. Keys of the protocol that are missing here are refused, but for those that change no text."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = Field(default=None, max_length=500, description="The bundle's name (routed), or a task's.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, description="Most new tokens.")
    temperature: float | None = Field(
        default=None,
        ge=0,
        le=2,
        description="0 takes the most probable token; null does as the base's configuration says.",
    )
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    n: int = 1
    frequency_penalty: Literal[0] | None = Field(default=None, description=_NEUTRAL)
    presence_penalty: Literal[0] | None = Field(default=None, description=_NEUTRAL)
    session: SessionKey | None = Field(
        default=None, description="A key of the conversation: its recent prompts count in the choice of the task."
    )
    user: str | None = Field(default=None, description="Not read.")

    @property
    def stops(self) -> list[str]:
        """The strings that the text ends before."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ChatRequest(WritingOptions):
    """A conversation to be answered."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"messages": [{"role": "user", "content": "win a free prize now"}], "max_tokens": 20}]
        }
    )
    messages: list[Message] = Field(min_length=1, max_length=10_000)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="The newer name of `max_tokens`.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    metadata: dict[str, Any] | None = Field(default=None, description="Not read.")
    store: bool | None = Field(default=None, description="Nothing is stored.")


class CompletionRequest(WritingOptions):
    """A prompt to be answered."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "win a free prize now", "max_tokens": 20}]})
    prompt: str | list[int] | list[str] = Field(description="One text, or its tokens.")
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Literal[False] | None = Field(default=None, description=_NEUTRAL)
    best_of: Literal[1] | None = Field(default=None, description=_NEUTRAL)
    suffix: None = Field(default=None, description=_NEUTRAL)


class OpenAIError(BaseModel):
    """What was wrong, as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: OpenAIError


class Usage(BaseModel):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Routed(BaseModel):
    """How the prompt was routed."""

    task: str
    confidence: float | None = Field(description="The probability that the task is right; null where it was given.")


class CompletionAnswer(BaseModel):
    """An answer in OpenAI's shape; an upstream's has no `mass`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage | None = None
    mass: Routed | None = None
