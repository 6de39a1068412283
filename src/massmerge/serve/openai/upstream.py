"""The server behind this one: requests go on to it with their task as the model, and its answers come back as they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic_core import from_json, to_json

from massmerge.errors import InputError
from massmerge.serve.errors import ServiceError
from massmerge.serve.settings import ServiceSettings

CONNECT = 10.0  # seconds
_MOST_ERROR = 100_000  # bytes that are read of an answer that is an error
_PASSED = ("content-type", "retry-after", "cache-control")


class Upstream:
    """A server of OpenAI's protocol.

    Args:
        settings: of the service; they name it.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        assert settings.upstream is not None
        self.url, self._settings = upstream_url(settings.upstream), settings
        within = settings.timeout
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(within, connect=min(CONNECT, within)),
            limits=httpx.Limits(max_connections=settings.max_requests),
            trust_env=False,  # the address was given by whoever runs the service
        )

    async def send(self, path: str, body: Mapping[str, Any], authorization: str | None) -> httpx.Response:
        """What the upstream answers; its body is still to be read, and the answer to be closed.

        Args:
            path: as clients of this service name it.
            body: of the request.
            authorization: of the client, which goes on where nothing else is said.

        Raises:
            ServiceError: it cannot be reached, or does not begin to answer in time.
        """
        headers: dict[str, Any] = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._settings.upstream_key is not None:
            headers["Authorization"] = f"Bearer {self._settings.upstream_key.decode()}"
        elif authorization and self._settings.api_key is None:  # the key of this service is nobody else's business
            headers["Authorization"] = authorization.encode("latin-1")  # the bytes that came
        try:
            asked = self._client.build_request("POST", self.url + path, content=to_json(body), headers=headers)
            return await self._client.send(asked, stream=True)
        except httpx.TimeoutException:
            raise _late(self._settings.timeout) from None
        except httpx.HTTPError as error:
            raise ServiceError(
                502, "upstream_unreachable", f"The upstream failed ({type(error).__name__}).", 2
            ) from None

    async def pieces(self, answer: httpx.Response) -> AsyncGenerator[bytes, None]:
        """The body of an answer as it comes."""
        try:
            async for piece in answer.aiter_raw():
                yield piece
        except httpx.TimeoutException:
            raise _late(self._settings.timeout) from None
        except httpx.HTTPError as error:
            raise ServiceError(502, "upstream_broke_off", f"The upstream broke off ({type(error).__name__}).") from None
        finally:
            await answer.aclose()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


def upstream_url(text: str) -> str:
    """An upstream's address without a path of the protocol.

    Raises:
        InputError: it is no address.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise InputError(f"--upstream {text!r}: give an address such as http://localhost:8001.")
    return text.rstrip("/").removesuffix("/v1")


def passed_headers(answer: httpx.Response) -> dict[str, str]:
    """The headers of an answer that its client should see."""
    return {name: answer.headers[name] for name in _PASSED if name in answer.headers}


async def error_of(answer: httpx.Response) -> dict[str, Any]:
    """An answer that is an error, in OpenAI's shape, whatever its own is."""
    text = b""
    try:
        async for piece in answer.aiter_raw():
            text += piece
            if len(text) > _MOST_ERROR:
                break
    except httpx.HTTPError:
        text = b""
    finally:
        await answer.aclose()
    try:
        body = from_json(text)
    except ValueError:
        body = None
    said = body.get("error", body) if isinstance(body, dict) else None
    if not isinstance(said, dict) or not isinstance(said.get("message"), str):
        said = {"message": f"The upstream answered with status {answer.status_code}."}
    return {"error": {"type": "upstream_error", "param": None, "code": "upstream_error", **said}}


def _late(seconds: float) -> ServiceError:
    return ServiceError(504, "upstream_timeout", f"The upstream sent nothing for {seconds:g} s.", 2)
