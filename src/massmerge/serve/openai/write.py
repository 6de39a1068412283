"""Answers in OpenAI's protocol that this service writes itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from fastapi import Request
from starlette.responses import Response

from massmerge.model.answers import Prediction
from massmerge.serve.bodies import json_response
from massmerge.serve.errors import ServiceError
from massmerge.serve.openai.asking import ask_of
from massmerge.serve.openai.bodies import Completion, mass_headers
from massmerge.serve.openai.schemas import ChatRequest, CompletionRequest
from massmerge.serve.service import Service
from massmerge.serve.streams import EVENTS, Streamed, event
from massmerge.serve.texts import Begun, Written
from massmerge.serve.writing import Job


async def write(service: Service, request: Request, given: ChatRequest | CompletionRequest) -> Response:
    """The answer to a request, whole or as a stream."""
    ask = ask_of(given, service.settings, service.loaded.model.tasks)
    deadline = request.state.deadline
    request.state.inputs = 1
    job = service.writer.submit(ask, (deadline - asyncio.get_running_loop().time()) / 2)
    try:
        begun = await service.finished(request, job.next(), deadline)
        assert isinstance(begun, Begun)
        name = given.model or service.settings.model_name
        body = Completion(name, begun, chat=isinstance(given, ChatRequest), logprobs=ask.logprobs is not None)
        task = begun.routing.selected[0]
        service.count([Prediction(task, confidence=begun.routing.confidence, routing=begun.routing)])
        headers = mass_headers(task, begun.routing.confidence)
        if given.stream:
            usage = given.stream_options is not None and given.stream_options.include_usage
            headers |= {"Content-Type": f"{EVENTS}; charset=utf-8", "Cache-Control": "no-cache"}
            pieces = _events(service, job, body, usage=usage)
            return Streamed(service, pieces, 200, headers, request.url.path)
        written = await service.finished(request, _all(job), deadline)
    except BaseException:
        service.writer.cancel(job)
        raise
    service.metrics.count_tokens(begun.tokens, sum(one.count for one in written))
    return json_response(body.whole(written), headers=headers)


async def _all(job: Job) -> list[Written]:
    """The text to its end."""
    found: list[Written] = []
    while not found or found[-1].end is None:
        piece = await job.next()
        assert isinstance(piece, Written)
        found.append(piece)
    return found


async def _events(service: Service, job: Job, body: Completion, *, usage: bool) -> AsyncGenerator[bytes, None]:
    """The text as events; each piece must come within the time in which a whole answer would have to."""
    found: list[Written] = []
    held: list[Written] = []  # tokens whose text is still to come
    try:
        for first in body.first():
            yield event(first)
        while not found or found[-1].end is None:
            try:
                async with asyncio.timeout(service.settings.timeout):
                    piece = await job.next()
            except TimeoutError:
                message = f"No token within {service.settings.timeout:g} s."
                raise ServiceError(503, "timeout", message) from None
            assert isinstance(piece, Written)
            found.append(piece)
            held.append(piece)
            if piece.text or piece.end:
                tokens = tuple(token for one in held for token in one.tokens)
                yield event(body.piece(Written(piece.text, 0, tokens, piece.end)))
                held = []
        if usage:
            yield event(body.last(found))
        yield b"data: [DONE]\n\n"
    finally:
        service.writer.cancel(job)
        count = body.usage(found)
        service.metrics.count_tokens(count["prompt_tokens"], count["completion_tokens"])
