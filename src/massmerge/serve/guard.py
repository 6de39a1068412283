"""What every request goes through: its id, the key, limits while the body streams in, the log line, the figures."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from massmerge.serve.errors import ClientGone, ServiceError
from massmerge.serve.logs import without_values
from massmerge.serve.service import Service

log = logging.getLogger("massmerge.serve")
PROBES = ("/health", "/ready")
_ANSWERING = ("/v1/predict", "/", "/v1/route", "/v1/chat/completions", "/v1/completions")
_METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE")
_LOCKED = ("/v1/", "/admin/", "/metrics")
_DRAIN_SECONDS = 2.0  # that the rest of a refused body is read for
_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Wraps the application.

    Args:
        app: the application.
        service: what it serves.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service, self._settings = app, service, service.settings
        key = service.settings.api_key
        self._key = None if key is None else hashlib.sha256(key).digest()
        self._active = self._working = self._held = 0
        service.metrics.active.set_function(lambda: self._active)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        began = time.perf_counter()
        given = headers.get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["request_id"] = given if _ID.fullmatch(given) else uuid4().hex
        state["deadline"] = asyncio.get_running_loop().time() + self._settings.timeout
        answer = _Answer(send, state["request_id"], self._service)
        self._active += 1
        try:
            self._refuse(scope, headers)
            await self._app(scope, self._limited(receive, state), answer)
        except (ClientGone, ClientDisconnect):
            answer.status = 499
        except ServiceError as error:
            await answer.fail(error, scope, receive)
        except Exception as error:
            log.error("fault", extra={"request_id": state["request_id"], "fault": without_values(error)})
            await answer.fail(
                ServiceError(500, "internal", "Internal error; see the log of the service."), scope, receive
            )
        finally:
            self._active -= 1
            self._working -= state.get("complete", False)
            self._held -= state.get("bytes", 0)
            self._note(scope, state, answer.status, time.perf_counter() - began)

    def _refuse(self, scope: Scope, headers: Headers) -> None:
        """Raise an error for a request that is not even to be read."""
        path = scope["path"]
        if path in PROBES:
            return
        if self._key is not None and (path.startswith(_LOCKED) or (path == "/" and scope["method"] == "POST")):
            self._check_key(headers)
        if self._working >= self._settings.max_requests:  # one whose body has not arrived takes nobody's place
            message = f"{self._working} requests are in progress; the limit is {self._settings.max_requests}."
            raise ServiceError(503, "full", message, 1)
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            raise ServiceError(400, "bad_request", "Content-Length is not a number.")
        if int(length[:20]) > self._settings.max_body:
            raise self._too_large()

    def _check_key(self, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Digests have one length, and the comparison takes as long whatever they hold.
        if not hmac.compare_digest(hashlib.sha256(key.encode()).digest(), self._key or b""):
            raise ServiceError(401, "unauthorized", "Give the key as `Authorization: Bearer …` or `X-API-Key: …`.")

    def _too_large(self) -> ServiceError:
        return ServiceError(413, "too_large", f"The body has more than {self._settings.max_body:,} bytes.")

    def _limited(self, receive: Receive, state: dict[str, Any]) -> Receive:
        """The body as it comes in, up to its limit, the limit of all bodies, and the deadline."""
        state["bytes"], state["complete"] = 0, False

        async def limited() -> Message:
            """The next piece of the body."""
            if state["complete"]:  # what comes now is only the end of the connection
                return await receive()
            try:
                async with asyncio.timeout_at(state["deadline"]):
                    message = await receive()
            except TimeoutError:
                raise ServiceError(408, "timeout", "The request did not arrive in time.") from None
            state["complete"] = not message.get("more_body", False)
            self._working += state["complete"]
            state["bytes"] += len(message.get("body", b""))
            self._held += len(message.get("body", b""))
            if state["bytes"] > self._settings.max_body:
                raise self._too_large()
            if self._held > self._settings.max_held:
                raise ServiceError(
                    503, "full", f"Requests in progress hold more than {self._settings.max_held:,} bytes.", 1
                )
            return message

        return limited

    def _note(self, scope: Scope, state: dict[str, Any], status: int, seconds: float) -> None:
        # Clients could make up any number of paths and methods, and each would be a figure of its own.
        route = scope["path"] if scope["path"] in scope["app"].openapi()["paths"] else "other"
        method = scope["method"] if scope["method"] in _METHODS and route != "other" else "other"
        metrics = self._service.metrics
        metrics.requests.labels(method, route, str(status)).inc()
        metrics.latency.labels(route).observe(seconds)
        if route in _ANSWERING and method == "POST" and status == 200:
            self._service.traffic.took(seconds)
        level = logging.DEBUG if route in PROBES else logging.INFO
        client = scope["client"][0] if scope.get("client") else None
        log.log(level, "request", extra={
            "request_id": state["request_id"], "method": scope["method"][:10], "path": route, "status": status,
            "ms": round(1000 * seconds, 1), "inputs": state.get("inputs"), "code": state.get("code"), "client": client,
        })  # fmt: skip


class _Answer:
    """Sends what the application sends, with the headers that every answer has."""

    def __init__(self, send: Send, request_id: str, service: Service) -> None:
        self._send, self._request_id, self._service = send, request_id, service
        self.status, self._started = 500, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self._started = message["status"], True
            headers = MutableHeaders(scope=message)
            headers["X-Request-ID"] = self._request_id
            if self._service.ending:  # the client's next request belongs elsewhere
                headers["Connection"] = "close"
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)

    async def fail(self, error: ServiceError, scope: Scope, receive: Receive) -> None:
        """Answer with an error, if nothing has been sent yet."""
        scope["state"]["code"] = error.code
        if self._started:
            return
        response = error.response(scope["path"])
        if not await _drained(scope, receive):
            response.headers["Connection"] = "close"
        await response(scope, receive, self)


async def _drained(scope: Scope, receive: Receive) -> bool:
    """Whether the rest of a refused body has been read and dropped: many clients read no answer before all is sent."""
    headers = Headers(scope=scope)
    if scope["state"].get("complete") or ("content-length" not in headers and "transfer-encoding" not in headers):
        return True
    if "expect" in headers:  # this client asks before it sends
        return False
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        return False
    return True
