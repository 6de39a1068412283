"""The endpoints that tell what is served, and how it does."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from massmerge.serve.errors import ServiceError
from massmerge.serve.openapi import ERRORS
from massmerge.serve.schemas import (
    BundleAnswer,
    ModelsAnswer,
    ReloadAnswer,
    StateAnswer,
    TasksAnswer,
    TrafficAnswer,
)
from massmerge.serve.service import Service

_SOME: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 503)}


def make_routes(service: Service) -> APIRouter:
    """Everything that is asked for by GET, and the reload."""
    router = APIRouter()
    _add_bundle(router, service)
    _add_state(router, service)
    return router


def _add_bundle(router: APIRouter, service: Service) -> None:
    """What is served."""

    @router.get("/v1/tasks", response_model=TasksAnswer, responses=_SOME, tags=["bundle"])
    async def tasks() -> dict[str, Any]:
        """The tasks with their labels and sizes."""
        return {"model": service.settings.model_name, "tasks": service.loaded.tasks()}

    @router.get("/v1/bundle", response_model=BundleAnswer, responses=_SOME, tags=["bundle"])
    async def bundle() -> dict[str, Any]:
        """All that the page shows of the bundle: tasks, sizes, similarity, examples, settings, versions."""
        return service.loaded.describe(service.settings)

    @router.get("/v1/models", response_model=ModelsAnswer, responses=_SOME, tags=["bundle"])
    async def models() -> dict[str, Any]:
        """The model that is served, in the list that OpenAI's clients read; where texts are written, also each task."""
        loaded = service.loaded
        tasks = loaded.model.tasks
        name = service.settings.model_name
        names = {name: tasks}
        if loaded.answers == "text" or service.upstream is not None:
            names |= {task: [task] for task in tasks if task != name}
        same = {"object": "model", "created": int(loaded.at), "owned_by": "massmerge", "kind": loaded.kind}
        entries = [{"id": one, **same, "tasks": own} for one, own in names.items()]
        return {"object": "list", "data": entries}


def _add_state(router: APIRouter, service: Service) -> None:
    """How it does."""

    @router.get("/v1/traffic", response_model=TrafficAnswer, responses=_SOME, tags=["state"])
    async def traffic() -> dict[str, Any]:
        """Answers by task since the start and in the last minutes; time of the last requests."""
        return service.traffic.report(service.waiting, service.settings.queue)

    @router.get("/health", response_model=StateAnswer, tags=["state"])
    async def health() -> dict[str, str]:
        """Whether the process is alive."""
        return {"status": "alive"}

    @router.get("/ready", response_model=StateAnswer, responses={503: ERRORS[503]}, tags=["state"])
    async def ready() -> dict[str, str]:
        """Whether the bundle is loaded and warmed, and requests are taken."""
        if service.ending:
            raise ServiceError(503, "stopping", "The service is stopping.", 5)
        assert service.loaded
        return {"status": "ready"}

    @router.get("/metrics", response_class=Response, responses={401: ERRORS[401]}, tags=["state"])
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.post(
        "/admin/reload",
        response_model=ReloadAnswer,
        responses={**_SOME, 403: ERRORS[401], 409: ERRORS[400]},
        tags=["state"],
    )
    async def reload() -> dict[str, Any] | JSONResponse:
        """Load the bundle's folder again; requests are answered by the old one until the new one is ready."""
        if service.settings.api_key is None:
            raise ServiceError(403, "forbidden", "Reloading over HTTP needs --api-key-file; SIGHUP works without it.")
        began = time.monotonic()
        loaded = await service.reload()
        seconds = round(time.monotonic() - began, 2)
        return {"model": service.settings.model_name, "tasks": loaded.model.tasks, "seconds": seconds}
