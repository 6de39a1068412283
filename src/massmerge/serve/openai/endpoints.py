"""OpenAI's endpoints."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from massmerge.serve.errors import ServiceError
from massmerge.serve.openai.asking import read_request
from massmerge.serve.openai.proxy import forward
from massmerge.serve.openai.schemas import ChatRequest, CompletionAnswer, CompletionRequest, OpenAIErrorAnswer
from massmerge.serve.openai.write import write
from massmerge.serve.openapi import CHAT_BODY, COMPLETION_BODY, ERRORS
from massmerge.serve.reading import media_type
from massmerge.serve.service import Service

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**said, "model": OpenAIErrorAnswer} for status, said in ERRORS.items() if status != 422
} | {404: {"model": OpenAIErrorAnswer, "description": "There is no such model, or no text is written here."}}
_DESCRIBED: dict[str, Any] = {"response_model": CompletionAnswer, "responses": _ERRORS, "tags": ["answers"]}


def make_routes(service: Service) -> APIRouter:
    """`POST /v1/chat/completions` and `POST /v1/completions`."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=CHAT_BODY, **_DESCRIBED)
    async def chat(request: Request) -> Response:
        """Answer a conversation, in OpenAI's protocol: routed where `model` is the bundle's name, or by the task named.

        With `stream`, the answer comes as server-sent events. `mass` in each body, and the headers `X-Mass-Task` and
        `X-Mass-Confidence`, say how the prompt was routed.
        """
        return await _answer(service, request, ChatRequest)

    @router.post("/v1/completions", openapi_extra=COMPLETION_BODY, **_DESCRIBED)
    async def complete(request: Request) -> Response:
        """Answer a prompt, in OpenAI's protocol; as `/v1/chat/completions`."""
        return await _answer(service, request, CompletionRequest)

    return router


async def _answer(service: Service, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
    if media_type(request) != "application/json":
        raise ServiceError(415, "unsupported_media_type", "Send application/json.")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ServiceError(415, "unsupported_media_type", "Content-Encoding is not supported; send the body as it is.")
    if service.upstream is not None:
        return await forward(service, service.upstream, request)
    service.loaded.refuse_unless("text")
    return await write(service, request, await read_request(request, kind))
