"""Answers that are sent piece by piece: they end with their client, with the service, or by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from massmerge.serve.errors import ClientGone, ServiceError
from massmerge.serve.service import Service, disconnected

EVENTS = "text/event-stream"
STOPPING = ServiceError(503, "stopping", "The service is stopping and can no longer answer.", 5)


class Streamed(Response):
    """An answer whose pieces are sent as they come.

    Args:
        service: cancels what is under way when its time to stop is over.
        pieces: of the body; closed when nobody reads on.
        status: of HTTP.
        headers: beside those that every answer has.
        path: of the request, which decides how an error reads.
    """

    def __init__(
        self,
        service: Service,
        pieces: AsyncGenerator[bytes, None],
        status: int,
        headers: Mapping[str, str],
        path: str,
    ) -> None:
        super().__init__(status_code=status, headers=headers)
        del self.headers["content-length"]
        self._service, self._pieces, self._path = service, pieces, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        start: dict[str, Any] = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        work = asyncio.create_task(self._send(send))
        gone = asyncio.ensure_future(disconnected(Request(scope, receive)))
        try:
            with self._service.under_way(work):
                waits: set[asyncio.Future[Any]] = {work, gone}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
            await self._pieces.aclose()
        if gone.done() and not gone.cancelled():
            raise ClientGone
        await self._end(work, send)

    async def _send(self, send: Send) -> None:
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _end(self, work: asyncio.Task[None], send: Send) -> None:
        """Say that all was sent; where that is not so, in events say why, and break off all else."""
        fault: BaseException | None = STOPPING if work.cancelled() else work.exception()
        if fault is not None and (self.headers.get("content-type") or "").startswith(EVENTS):
            error = fault if isinstance(fault, ServiceError) else ServiceError(500, "internal", "Internal error.")
            await send({"type": "http.response.body", "body": event(error.body(self._path)), "more_body": True})
        elif fault is not None:
            raise fault
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(body: Any) -> bytes:
    """An event that holds JSON."""
    return b"data: " + to_json(body, inf_nan_mode="null") + b"\n\n"
