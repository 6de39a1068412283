"""The endpoint that names tasks and answers nothing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from massmerge.serve.bodies import choice_of, json_response, route_body, status_of
from massmerge.serve.openapi import ERRORS, ROUTE_BODY
from massmerge.serve.reading import read_route
from massmerge.serve.schemas import RouteAnswer
from massmerge.serve.service import Service


def make_routes(service: Service) -> APIRouter:
    """`POST /v1/route`."""
    router = APIRouter()

    @router.post("/v1/route", response_model=RouteAnswer, responses=ERRORS, openapi_extra=ROUTE_BODY, tags=["answers"])
    async def route(request: Request) -> Response:
        """Name the task of each input, or of a conversation, and how probable it is that it is the right one.

        One pass up to the last voting site; nothing is answered. An input that cannot be read has its error in its place.
        """
        items, options = await read_route(request, service.settings)
        state = request.state
        state.inputs = len(items)
        choice = choice_of(options, state.request_id, service.loaded.model.tasks)
        outcomes = await service.answer(request, items, choice, options.top_k, state.deadline, options.session)
        body: dict[str, Any] = {
            "request_id": state.request_id,
            "model": service.settings.model_name,
            "routes": [route_body(outcome, options.top_k) for outcome in outcomes],
        }
        status = status_of(outcomes)
        if status != 200:
            body["error"] = body["routes"][0]["error"]
        return json_response(body, status)

    return router
