"""Requests in OpenAI's protocol that go on to an upstream, each with the task that its prompt is routed to as the model."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.responses import Response

from massmerge.model.answers import Prediction
from massmerge.serve.batching import BatchKey, Fault
from massmerge.serve.bodies import json_response
from massmerge.serve.errors import ServiceError
from massmerge.serve.openai.bodies import mass_headers
from massmerge.serve.openai.upstream import Upstream, error_of, passed_headers
from massmerge.serve.reading import chat_of
from massmerge.serve.schemas import Message, SessionKey
from massmerge.serve.service import Service
from massmerge.serve.streams import Streamed
from massmerge.serve.worker import Item, SentTokens

_MESSAGES = TypeAdapter(list[Message])
_TOKENS = TypeAdapter(list[int])
_SESSION: TypeAdapter[str | None] = TypeAdapter(SessionKey | None)


async def forward(service: Service, upstream: Upstream, request: Request) -> Response:
    """The upstream's answer to a request."""
    path = request.url.path
    body = _object(await request.body())
    session = _session(body)
    model, found = await _model(service, request, body, session)
    request.state.inputs = 1
    sent = upstream.send(path, {**body, "model": model}, request.headers.get("authorization"))
    answer = await service.finished(request, sent, request.state.deadline)
    headers = passed_headers(answer) | ({} if found is None else mass_headers(found.task, found.confidence))
    if answer.status_code >= 400:
        said = await service.finished(request, error_of(answer), request.state.deadline)
        request.state.code = "upstream_error"
        return json_response(said, answer.status_code, {k: v for k, v in headers.items() if k != "content-type"})
    return Streamed(service, upstream.pieces(answer), answer.status_code, headers, path)


async def _model(
    service: Service, request: Request, body: dict[str, Any], session: str | None
) -> tuple[str, Prediction | None]:
    """The upstream's model, and how it was found; any name but the bundle's is left alone."""
    loaded = service.loaded
    named = body.get("model")
    if named is not None and not isinstance(named, str):
        raise ServiceError(400, "invalid", "model: give a name.", param="model")
    if named not in (None, service.settings.model_name):
        if named in loaded.model.tasks:
            given = Prediction(named)
            service.count([given])
            return named, given
        return named, None
    item = _item(body)
    choice = BatchKey(only_route=True)
    outcome = (await service.answer(request, [item], choice, 1, request.state.deadline, session))[0]
    if isinstance(outcome.result, Fault):
        status = 500 if outcome.result.code == "internal" else 400
        raise ServiceError(status, outcome.result.code, f"The prompt cannot be routed: {outcome.result.message}")
    task = outcome.result.task or service.settings.fallback_model
    if task is None:
        message = "No task fits this prompt. Name one as the model, or start the service with --fallback-model."
        raise ServiceError(400, "no_task", message, param="model")
    return task, outcome.result


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = from_json(body, allow_inf_nan=False)
        json.dumps(found, allow_nan=False)  # a number such as 1e999 is no name of infinity, and is read as it
    except ValueError:
        raise ServiceError(400, "bad_json", "The body is not valid JSON.") from None
    if not isinstance(found, dict):
        raise ServiceError(400, "invalid", "The body must be a JSON object.")
    return found


def _session(body: dict[str, Any]) -> str | None:
    """The session of a request, taken out of it: the key is this service's, and no upstream knows it."""
    try:
        return _SESSION.validate_python(body.pop("session", None), strict=True)
    except ValidationError:
        message = "session: give a key of 1 to 200 characters."
        raise ServiceError(400, "invalid", message, param="session") from None


def _item(body: dict[str, Any]) -> Item:
    """What is routed of a request: its conversation, or its prompt."""
    try:
        if "messages" in body:
            return chat_of(_MESSAGES.validate_python(body["messages"], strict=True))
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        return SentTokens(tuple(_TOKENS.validate_python(prompt, strict=True)))
    except ValidationError:
        name = "messages" if "messages" in body else "prompt"
        wanted = {"messages": "give a list of messages with role and content", "prompt": "give one text per request"}
        raise ServiceError(400, "invalid", f"{name}: {wanted[name]}.", param=name) from None
