"""The page's files, served by the application itself."""

from __future__ import annotations

import mimetypes
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from massmerge.serve.errors import ServiceError

FOLDER = Path(__file__).parent / "page"


def make_routes() -> APIRouter:
    """`GET /` and the files that the page asks for; none but those of the folder can be named."""
    router = APIRouter()
    names = sorted(path.name for path in FOLDER.iterdir() if path.is_file()) if FOLDER.is_dir() else []

    def serve(name: str) -> Response:
        """A file of the page, with its type."""
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response((FOLDER / name).read_bytes(), media_type=kind, headers={"Cache-Control": "no-cache"})

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        """The page itself."""
        if "index.html" not in names:
            raise ServiceError(404, "not_found", "There is no page here; the API is described at /docs.")
        return serve("index.html")

    for name in names:
        router.add_api_route(f"/{name}", _file(name, serve), include_in_schema=False)
    return router


def _file(name: str, serve: Callable[[str], Response]) -> Callable[[], Awaitable[Response]]:
    async def file() -> Response:
        """One file."""
        return serve(name)

    return file
