"""OpenAI's endpoints."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from massmerge.serve.errors import ServiceError
from massmerge.serve.openai.proxy import forward
from massmerge.serve.reading import media_type
from massmerge.serve.service import Service


def make_routes(service: Service) -> APIRouter:
    """`POST /v1/chat/completions` and `POST /v1/completions`."""
    router = APIRouter()

    @router.post("/v1/chat/completions", tags=["answers"])
    async def chat(request: Request) -> Response:
        """Answer a conversation, in OpenAI's protocol."""
        return await _answer(service, request)

    @router.post("/v1/completions", tags=["answers"])
    async def complete(request: Request) -> Response:
        """Answer a prompt, in OpenAI's protocol."""
        return await _answer(service, request)

    return router


async def _answer(service: Service, request: Request) -> Response:
    if media_type(request) != "application/json":
        raise ServiceError(415, "unsupported_media_type", "Send application/json.")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ServiceError(415, "unsupported_media_type", "Content-Encoding is not supported; send the body as it is.")
    if service.upstream is not None:
        return await forward(service, service.upstream, request)
    service.loaded.refuse_unless("text")
    raise ServiceError(404, "not_served", "Not yet.")
