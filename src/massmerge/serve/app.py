"""The application: endpoints, guard, and the life of the service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import massmerge
from massmerge.serve import about, docs_page, page_files, predict, route
from massmerge.serve.errors import of_status
from massmerge.serve.guard import Guard
from massmerge.serve.openai import endpoints
from massmerge.serve.openapi import complete_openapi
from massmerge.serve.service import Service
from massmerge.serve.settings import ServiceSettings

_ABOUT = "One backbone and many fine-tuned experts: send an input without a task name, get task, label and score."


def make_app(settings: ServiceSettings) -> FastAPI:
    """The application for a bundle; its service is `app.state.service`."""
    service = Service(settings)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        """Start the service, and stop it at the end."""
        service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="mass serve", summary=_ABOUT, version=massmerge.__version__, lifespan=life, docs_url=None, redoc_url=None,
        exception_handlers={HTTPException: _refused},
    )  # fmt: skip
    app.state.service = service
    for part in (predict, route, endpoints, about):
        app.include_router(part.make_routes(service))
    app.include_router(page_files.make_routes())
    docs_page.add_docs(app)
    complete_openapi(app, locked=settings.api_key is not None)
    app.add_middleware(Guard, service=service)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-API-Key", "X-Request-ID"],
            expose_headers=["X-Request-ID", "Retry-After", "X-Mass-Task", "X-Mass-Confidence"],
        )  # fmt: skip
    return app


async def _refused(request: Request, error: Exception) -> Response:
    """What the framework refuses, such as a path that is not there, in the form of all errors."""
    assert isinstance(error, HTTPException)
    response = of_status(error.status_code, f"{error.detail}. See /docs.").response()
    response.headers.update(error.headers or {})
    return response
