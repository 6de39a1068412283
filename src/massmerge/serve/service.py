"""The service behind the endpoints: the loaded bundle, the queue, the figures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from starlette.requests import Request

from massmerge.errors import MassError
from massmerge.model import Model
from massmerge.serve.batching import Batcher, Choice, Outcome
from massmerge.serve.errors import ClientGone, ServiceError
from massmerge.serve.loaded import Loaded, load_bundle
from massmerge.serve.logs import without_values
from massmerge.serve.metrics import Metrics
from massmerge.serve.settings import Settings
from massmerge.serve.traffic import Traffic
from massmerge.serve.worker import Worker

log = logging.getLogger("massmerge.serve")


class Service:
    """A bundle that is served.

    Args:
        settings: what the service was told.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics, self.traffic = Metrics(), Traffic()
        self.stopping = False
        self.failure: Exception | None = None
        self.loading: asyncio.Task[None] | None = None
        self._loaded: Loaded | None = None
        self._batcher: Batcher | None = None
        self._reloading = asyncio.Lock()

    # Life

    def start(self) -> None:
        """Begin to load; the service is alive at once, and ready when that is done."""
        settings = self.settings
        worker = Worker(self._model, max_text=settings.max_text, max_pixels=settings.max_pixels)
        self._batcher = Batcher(
            worker, size=settings.batch_size, wait=settings.batch_wait / 1000, limit=settings.queue,
            begin=self._set_threads, hear=self.metrics.batch,
        )  # fmt: skip
        self.metrics.queue.set_function(lambda: self.waiting)
        self.metrics.ready.set_function(lambda: self._loaded is not None and not self.stopping)
        self.loading = asyncio.create_task(self._first_load())

    async def stop(self) -> None:
        """Answer what is under way, then end the thread."""
        self.stopping = True
        if self.loading:
            self.loading.cancel()
        if self._batcher:
            await asyncio.to_thread(self._batcher.close)

    async def _first_load(self) -> None:
        try:
            await self._load()
        except Exception as error:
            self.failure = error
            log.error("the bundle cannot be loaded", extra={"bundle": str(self.settings.bundle)})

    async def _load(self) -> None:
        began = time.monotonic()
        self._loaded = await asyncio.to_thread(load_bundle, self.settings)
        took = round(time.monotonic() - began, 2)
        log.info("bundle loaded", extra={"bundle": str(self.settings.bundle), "seconds": took})

    def _set_threads(self) -> None:
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)

    async def reload(self) -> Loaded:
        """Load the bundle again and answer with it from then on; until then, and if it cannot be loaded, with the old one.

        Raises:
            ServiceError: it cannot be loaded.
        """
        async with self._reloading:
            try:
                await self._load()
            except Exception as error:  # whatever is wrong with the new bundle, the old one answers
                self.metrics.reloads.labels("failed").inc()
                log.error("reload failed; the old bundle answers", extra={"fault": without_values(error)})
                reason = str(error) if isinstance(error, MassError) else type(error).__name__
                message = f"The bundle could not be loaded, the old one goes on answering: {reason}"
                raise ServiceError(409, "reload_failed", message) from None
            self.metrics.reloads.labels("done").inc()
            return self.loaded

    # State

    @property
    def loaded(self) -> Loaded:
        """The bundle that answers.

        Raises:
            ServiceError: it is not loaded yet.
        """
        if self._loaded is None:
            raise ServiceError(503, "not_ready", "The bundle is being loaded.", 2)
        return self._loaded

    def _model(self) -> Model:
        return self.loaded.model

    @property
    def waiting(self) -> int:
        """Inputs in the queue."""
        return self._batcher.waiting if self._batcher else 0

    # Answers

    async def answer(
        self, request: Request, items: Sequence[Any], choice: Choice, top: int, deadline: float
    ) -> list[Outcome]:
        """Answer the inputs of a request, whose body has been read.

        Raises:
            ServiceError: there is no room, or no time left.
            ClientGone: nobody waits for the answer any more.
        """
        assert self._batcher is not None
        left = deadline - asyncio.get_running_loop().time()
        # Half of the time: how long the queue takes is a guess, and an answer that comes too late is work for nothing.
        job = self._batcher.submit(items, choice, top, left / 2)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            async with asyncio.timeout_at(deadline):
                waits: set[asyncio.Future[Any]] = {job.done, gone}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            message = f"There was no answer within {self.settings.timeout:g} s."
            raise ServiceError(503, "timeout", message, self._batcher.retry_after()) from None
        finally:
            gone.cancel()
            if not job.done.done():
                self._batcher.cancel(job)
        if not job.done.done() or job.done.cancelled():
            raise ClientGone
        outcomes = job.done.result()
        results = [outcome.result for outcome in outcomes]
        self.metrics.count(results)
        self.traffic.count(results)
        return outcomes


async def _disconnected(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
