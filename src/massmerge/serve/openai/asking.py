"""From a request in OpenAI's protocol to what is written for it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from fastapi import Request
from pydantic import ValidationError

from massmerge.serve.errors import ServiceError
from massmerge.serve.openai.schemas import ChatRequest, CompletionRequest, WritingOptions
from massmerge.serve.reading import chat_of, explained
from massmerge.serve.settings import ServiceSettings
from massmerge.serve.texts import Ask

_COLDEST = 1e-3  # below it scores overflow, and the most probable token is as good as certain
_MOST_STOPS, _LONGEST_STOP = 16, 200
_R = TypeVar("_R", bound=WritingOptions)


async def read_request(request: Request, kind: type[_R]) -> _R:
    """The body of a request.

    Raises:
        ServiceError: it is not of that form, or asks for what is not done here.
    """
    try:
        found = kind.model_validate_json(await request.body())
    except ValidationError as error:
        said = explained(error)
        param = str(error.errors(include_url=False)[0]["loc"][0]) if said.code == "invalid" else None
        raise ServiceError(400, said.code, said.message, param=param) from None
    if found.n != 1:
        raise ServiceError(400, "invalid", "n: one answer is written per request. Leave it at 1.", param="n")
    stops = found.stops
    if len(stops) > _MOST_STOPS or any(not 0 < len(stop) <= _LONGEST_STOP for stop in stops):
        message = f"stop: at most {_MOST_STOPS} strings of 1 to {_LONGEST_STOP} characters."
        raise ServiceError(400, "invalid", message, param="stop")
    return found


def ask_of(given: ChatRequest | CompletionRequest, settings: ServiceSettings, tasks: list[str]) -> Ask:
    """What is to be written.

    Args:
        given: the request.
        settings: of the service, with its limits.
        tasks: names of the tasks.

    Raises:
        ServiceError: there is no such model, the prompt is too long, or too many tokens are wanted.
    """
    task = None if given.model in (None, settings.model_name) else given.model
    if task is not None and task not in tasks:
        known = ", ".join([settings.model_name, *tasks])
        raise ServiceError(404, "model_not_found", f"There is no such model. Choose from {known}.", param="model")
    wanted = given.max_tokens
    if isinstance(given, ChatRequest):
        wanted = given.max_completion_tokens or wanted
        logprobs = (given.top_logprobs or 0) if given.logprobs else None
        prompt: Any = _conversation(given, settings)
    else:
        logprobs, prompt = given.logprobs, _prompt(given, settings)
    if wanted is not None and wanted > settings.max_new_tokens:
        message = f"max_tokens: at most {settings.max_new_tokens} are written for one request."
        raise ServiceError(400, "invalid", message, param="max_tokens")
    most = settings.max_new_tokens if wanted is None else wanted
    return Ask(prompt, task, most, wanted is None, given.seed, logprobs, _options(given), given.session)


def _options(given: WritingOptions) -> dict[str, Any]:
    """The same in the words of transformers' `generate`; what is not said is left to the base's configuration."""
    options: dict[str, Any] = {}
    if given.temperature is not None and given.temperature < _COLDEST:
        options["do_sample"] = False
    elif given.temperature is not None or given.top_p is not None or given.top_k is not None or given.min_p is not None:
        # transformers would draw from the 50 most probable tokens by default, which nobody has asked for.
        options |= {"do_sample": True, "temperature": given.temperature or 1.0, "top_k": given.top_k or 0}
        options |= {name: value for name in ("top_p", "min_p") if (value := getattr(given, name)) is not None}
    if given.repetition_penalty is not None:
        options["repetition_penalty"] = given.repetition_penalty
    if given.stops:
        options["stop_strings"] = given.stops
    return options


def _conversation(given: ChatRequest, settings: ServiceSettings) -> list[dict[str, str]]:
    messages = chat_of(given.messages).messages
    _refuse_long(sum(len(text) for _, text in messages), settings, "messages")
    if not messages:
        raise ServiceError(400, "invalid", "messages: there is no text in them.", param="messages")
    return [{"role": "system" if role == "developer" else role, "content": text} for role, text in messages]


def _prompt(given: CompletionRequest, settings: ServiceSettings) -> Any:
    prompt = given.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        _refuse_long(len(prompt), settings, "prompt")
        return prompt
    tokens = [token for token in prompt if isinstance(token, int)]
    if len(tokens) < len(prompt):
        raise ServiceError(400, "invalid", "prompt: give one text per request.", param="prompt")
    _refuse_long(len(tokens), settings, "prompt")
    if not all(0 <= token < 2**31 for token in tokens):
        raise ServiceError(400, "invalid", "prompt: these are no tokens.", param="prompt")
    return {"input_ids": torch.tensor(tokens, dtype=torch.long)}


def _refuse_long(length: int, settings: ServiceSettings, name: str) -> None:
    if length > settings.max_text:
        message = f"{name}: more than {settings.max_text:,} characters. Shorten them."
        raise ServiceError(400, "too_long", message, param=name)
