"""Connections that wait for their clients: none waits for long, and none keeps others out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS = 10.0  # seconds in which the headers of a request must arrive
IDLE = 30  # seconds that a connection is kept for the next request
UNREAD = 30.0  # seconds in which a client must go on reading its answer
FRESH = 1.0  # seconds in which the first request of a new connection is on its way, should the service stop
_BACKLOG = 128
_SPARE = 64  # file handles for all else, such as a bundle that is loaded again


class Connection(H11Protocol):
    """A connection that is closed when its client is too slow, or others need its place and it waits for its client.

    Args:
        limit: how many connections there may be.
    """

    def __init__(self, *args: Any, limit: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limit = limit
        self._since = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._dropped = False

    @property
    def _waits(self) -> bool:
        """Whether the next step is the client's."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request; the connection that has waited for the longest makes room, if there is none."""
        super().connection_made(transport)
        self._allow(HEADERS)
        kept = [c for c in self.connections if isinstance(c, Connection) and not c._dropped]
        if len(kept) > self._limit:
            min((c for c in kept if c._waits), key=lambda connection: connection._since)._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget about it."""
        super().connection_lost(exc)
        self._allow(None)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of headers have a time in which all must arrive, however many come in each piece."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            if self._timer is None:
                self._allow(HEADERS)
        elif not self.flow.write_paused:
            self._allow(None)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        super().pause_writing()
        self._allow(UNREAD)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._allow(None)

    def timeout_keep_alive_handler(self) -> None:
        """No other request came; an answer that nobody reads would keep a closed connection for good."""
        self._drop() if self.transport.get_write_buffer_size() else super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """The service stops: let the first request of a new connection arrive."""
        if self.cycle is None and self.loop.time() - self._since < FRESH:
            self._allow(FRESH)
        else:
            super().shutdown()

    def _allow(self, seconds: float | None) -> None:
        """Close the connection after so many seconds, instead of what was said before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._drop)

    def _drop(self) -> None:
        """Close the connection, whatever was still to be sent."""
        self._dropped = True
        self.transport.abort()


def connection_limits(most: int) -> tuple[int, int]:
    """How many connections there may be and how many may stand in line, so that both never take the last file handle.

    Args:
        most: how many are wanted at most.
    """
    free, handles = most + _BACKLOG, _handles()
    if handles is not None:
        free = max(2, handles - len(list(Path("/dev/fd").iterdir())) - min(_SPARE, handles // 4))
    backlog = max(1, min(_BACKLOG, free // 4))
    return min(most, free - backlog), backlog


def _handles() -> int | None:
    """How many files the process may open; none where there is no limit, or none that matters as on Windows."""
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit
