"""Runs the application: the socket, the signals, the exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from fastapi import FastAPI

from massmerge.errors import InputError, MassError
from massmerge.serve.app import make_app
from massmerge.serve.connections import IDLE, Connection, connection_limits
from massmerge.serve.errors import ServiceError
from massmerge.serve.queue_thread import ANSWERS
from massmerge.serve.service import LOADER, Service
from massmerge.serve.settings import ServiceSettings

log = logging.getLogger("massmerge.serve")
_DRAIN = 1.0  # seconds in which kept connections are told to close, before that is done unasked


class Server(uvicorn.Server):
    """A server whose signals are ours: it would die of SIGTERM again once it has stopped in good order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what arrives for another moment, so that the clients of kept connections hear of the end."""
        end = time.monotonic() + _DRAIN
        while self.server_state.connections and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


def make_server(app: FastAPI, settings: ServiceSettings) -> Server:
    """The server of an application, with limits on connections."""
    limit, backlog = connection_limits(settings.max_connections)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, lifespan="on", ws="none", backlog=backlog,
        http=partial(Connection, limit=limit),  # type: ignore[arg-type]
        timeout_keep_alive=IDLE, timeout_graceful_shutdown=math.ceil(settings.grace),
    )  # fmt: skip
    return Server(config)


def bind(settings: ServiceSettings) -> socket.socket:
    """The socket that the service listens on.

    Raises:
        InputError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # where it means an address that was used a moment ago; on Windows one in use
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise InputError(
            f"{settings.host}:{settings.port}: cannot listen there ({error.strerror}). Choose another with "
            "--host and --port."
        ) from None
    return listener


def run(settings: ServiceSettings, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; then finish what is under way and return.

    Raises:
        MassError: the bundle cannot be loaded, or nothing can be answered any more.
    """
    asyncio.run(_run(settings, listener, on_ready))
    if any(thread.name in (ANSWERS, LOADER) for thread in threading.enumerate()):
        # Python cannot end a thread, and to tear torch down under one that computes may crash.
        log.warning("unfinished work was cancelled")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


async def _run(settings: ServiceSettings, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    app = make_app(settings)
    service: Service = app.state.service
    server = make_server(app, settings)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        """Finish what is under way, then end; at once if asked again."""
        if service.stopping:
            server.force_exit = True
        service.stopping = server.should_exit = True
        loop.call_later(max(0.0, settings.grace - _DRAIN), service.give_up)
        log.info("stopping: finishing requests in progress")

    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        """Load the bundle anew beside the running one."""
        task = loop.create_task(_reload(service))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    for name, action in (("SIGTERM", stop), ("SIGINT", stop), ("SIGBREAK", stop), ("SIGHUP", reload)):
        _on_signal(loop, name, action)
    watch = loop.create_task(_watch(service, server, on_ready))
    await server.serve([listener])
    watch.cancel()
    if service.failure is not None:
        if isinstance(service.failure, MassError):
            raise service.failure
        raise MassError(f"{settings.bundle}: cannot be loaded ({type(service.failure).__name__}: {service.failure}).")


def _on_signal(loop: asyncio.AbstractEventLoop, name: str, action: Callable[[], None]) -> None:
    """Call something in the loop on a signal, where the system has it: Windows has no SIGHUP, and SIGBREAK instead."""
    number = getattr(signal, name, None)
    if number is None:
        return
    try:
        loop.add_signal_handler(number, action)
    except NotImplementedError:  # the loop of Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(action))


async def _watch(service: Service, server: Server, on_ready: Callable[[], None]) -> None:
    """Say when the service is ready; stop it once it cannot answer."""
    while service.loading is None:
        await asyncio.sleep(0.01)
    await service.loading
    if service.failure is None:
        on_ready()
    await service.failed.wait()
    server.should_exit = True


async def _reload(service: Service) -> None:
    with contextlib.suppress(ServiceError):  # it has been logged
        await service.reload()
