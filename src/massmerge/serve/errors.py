"""What a client gets when something is wrong: a status, a code and a sentence, never a stack trace."""

from __future__ import annotations

from starlette.responses import JSONResponse

OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models")
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
}


class ServiceError(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        code: for programs, such as `too_large`.
        message: a sentence for people.
        retry_after: seconds after which the client may try again.
        param: the key of the request that is wrong, if it is one.
    """

    def __init__(
        self, status: int, code: str, message: str, retry_after: int | None = None, *, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after = status, code, message, retry_after
        self.param = param

    def body(self, path: str = "") -> dict[str, dict[str, str | None]]:
        """The error as the client of a path reads it; those of OpenAI's paths read two keys more."""
        said: dict[str, str | None] = {"code": self.code, "message": self.message}
        if path in OPENAI_PATHS:
            said |= {"type": _TYPES.get(self.status, "server_error"), "param": self.param}
        return {"error": said}

    def response(self, path: str = "") -> JSONResponse:
        """The error as a response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(path), self.status, headers)


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


CODES_OF_STATUS = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}


def of_status(status: int, message: str) -> ServiceError:
    """The error for a status that the framework decided on."""
    return ServiceError(status, CODES_OF_STATUS.get(status, "refused"), message)
