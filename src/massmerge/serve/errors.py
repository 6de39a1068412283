"""What a client gets when something is wrong: a status, a code and a sentence, never a stack trace."""

from __future__ import annotations

from starlette.responses import JSONResponse


class ServiceError(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        code: for programs, such as `too_large`.
        message: a sentence for people.
        retry_after: seconds after which the client may try again.
    """

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after = status, code, message, retry_after

    def body(self) -> dict[str, dict[str, str]]:
        """The error as the client reads it."""
        return {"error": {"code": self.code, "message": self.message}}

    def response(self) -> JSONResponse:
        """The error as a response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


CODES_OF_STATUS = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}


def of_status(status: int, message: str) -> ServiceError:
    """The error for a status that the framework decided on."""
    return ServiceError(status, CODES_OF_STATUS.get(status, "refused"), message)
