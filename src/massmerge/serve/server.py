"""Runs the application: the socket, the signals, the exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from massmerge.errors import InputError, MassError
from massmerge.serve.app import make_app
from massmerge.serve.errors import ServiceError
from massmerge.serve.service import Service
from massmerge.serve.settings import Settings

log = logging.getLogger("massmerge.serve")
_MORE_THAN_TIMEOUT = 5  # seconds that answers may take beyond their deadline when the service stops


class _Server(uvicorn.Server):
    """A server whose signals are ours: it would die of SIGTERM again once it has stopped in good order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def bind(settings: Settings) -> socket.socket:
    """The socket that the service listens on.

    Raises:
        InputError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise InputError(
            f"{settings.host}:{settings.port}: cannot listen there ({error.strerror}). Choose another by --host and --port."
        ) from None
    return listener


def run(settings: Settings, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; then finish what is under way and return.

    Raises:
        MassError: the bundle cannot be loaded.
    """
    asyncio.run(_run(settings, listener, on_ready))


async def _run(settings: Settings, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    app = make_app(settings)
    service: Service = app.state.service
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_keep_alive=30, lifespan="on",
        timeout_graceful_shutdown=int(settings.timeout) + _MORE_THAN_TIMEOUT, ws="none",
    )  # fmt: skip
    server = _Server(config)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if service.stopping:
            server.force_exit = True
        service.stopping = server.should_exit = True
        log.info("stopping: requests under way are finished")

    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(_reload(service))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    watch = loop.create_task(_watch(service, server, on_ready))
    await server.serve([listener])
    watch.cancel()
    if service.failure is not None:
        if isinstance(service.failure, MassError):
            raise service.failure
        raise MassError(f"{settings.bundle}: cannot be loaded ({type(service.failure).__name__}: {service.failure}).")


async def _watch(service: Service, server: uvicorn.Server, on_ready: Callable[[], None]) -> None:
    """Say when the service is ready; stop it if it never will be."""
    while service.loading is None:
        await asyncio.sleep(0.01)
    await service.loading
    if service.failure is None:
        on_ready()
    else:
        server.should_exit = True


async def _reload(service: Service) -> None:
    with contextlib.suppress(ServiceError):  # it has been logged
        await service.reload()
