"""The service behind the endpoints: the loaded bundle, the queue, the figures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from starlette.requests import Request

from massmerge.errors import MassError
from massmerge.io.background import Background
from massmerge.model.answers import Prediction
from massmerge.model.generative import Generative
from massmerge.model.routing_model import RoutingModel
from massmerge.routing.sessions import Sessions
from massmerge.serve.batching import Batcher, BatchKey, Fault, Outcome
from massmerge.serve.decoding import Decoder
from massmerge.serve.errors import ClientGone, ServiceError
from massmerge.serve.loaded import Loaded, load_bundle
from massmerge.serve.logs import without_values
from massmerge.serve.metrics import Metrics
from massmerge.serve.openai.upstream import Upstream
from massmerge.serve.reservoir import Reservoir
from massmerge.serve.settings import ServiceSettings
from massmerge.serve.traffic import Traffic
from massmerge.serve.worker import InSession, Worker
from massmerge.serve.writing import TextWriter

log = logging.getLogger("massmerge.serve")
_R = TypeVar("_R")
LOADER = "mass-load"


class Service:
    """A bundle that is served.

    Args:
        settings: of the service.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.metrics, self.traffic = Metrics(), Traffic()
        self.stopping = False
        self.failure: Exception | None = None
        self.failed = asyncio.Event()
        self.loading: asyncio.Task[None] | None = None
        self._loaded: Loaded | None = None
        self._batcher: Batcher | None = None
        self._decoder: Decoder | None = None
        self._writer: TextWriter | None = None
        self._sessions = Sessions(expiry=settings.session_expiry, limit=settings.sessions)
        kept = settings.reservoir
        self.reservoir = None if kept is None else Reservoir(kept, settings.reservoir_size)
        self.upstream: Upstream | None = None
        """Where completions are written, if not here."""
        self._under_way: set[asyncio.Task[Any]] = set()
        self._reloading = asyncio.Lock()

    # Life

    def start(self) -> None:
        """Begin to load; the service is alive at once, and ready when that is done."""
        settings, sessions = self.settings, self._sessions
        worker = Worker(self._model, max_text=settings.max_text, max_pixels=settings.max_pixels, sessions=sessions)
        self._batcher = Batcher(
            worker, size=settings.batch_size, wait=settings.batch_wait / 1000, limit=settings.queue,
            begin=self._set_threads, hear=self.metrics.batch, died=self._died,
        )  # fmt: skip
        self._decoder = Decoder(worker, settings, self._set_threads)
        if settings.upstream is not None:
            self.upstream = Upstream(settings)
        self.metrics.queue.set_function(lambda: self.waiting)
        self.metrics.sessions.set_function(lambda: len(sessions))
        self.metrics.ready.set_function(lambda: self._loaded is not None and not self.ending)
        self.loading = asyncio.create_task(self._first_load())

    async def stop(self) -> None:
        """Answer what is under way, then end the threads; one that is busy for longer is left behind."""
        self.stopping = True
        if self.loading:
            self.loading.cancel()
        if self._decoder:
            self._decoder.close()
        if self._writer:
            await asyncio.to_thread(self._writer.close, 1.0)
        if self.upstream:
            await self.upstream.close()
        if self._batcher:
            await asyncio.to_thread(self._batcher.close, 1.0)
        if self.reservoir:
            await asyncio.to_thread(self.reservoir.write)

    def give_up(self) -> None:
        """Refuse what is still under way: the time in which it could be answered is over."""
        for work in self._under_way:
            work.cancel()

    def _died(self, error: BaseException) -> None:
        """The thread that answers has ended by an error: nothing can be answered any more."""
        log.error("the worker thread has ended; stopping the service", extra={"fault": without_values(error)})
        name = type(error).__name__
        self._fail(error if isinstance(error, MassError) else MassError(f"The worker thread has ended ({name})."))
        self.give_up()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self.failed.set()

    async def _first_load(self) -> None:
        try:
            await self._load()
        except Exception as error:
            log.error("the bundle cannot be loaded", extra={"bundle": str(self.settings.bundle)})
            self._fail(error)

    async def _load(self) -> None:
        began = time.monotonic()
        loaded = await _in_daemon(lambda: load_bundle(self.settings))
        if self.reservoir is not None:
            loaded = replace(loaded, model=loaded.model.watched(self.reservoir))
        self._loaded = loaded
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
                log.error("reload failed; the old bundle stays in use", extra={"fault": without_values(error)})
                reason = str(error) if isinstance(error, MassError) else type(error).__name__
                message = f"The bundle could not be loaded; the old one stays in use: {reason}"
                raise ServiceError(409, "reload_failed", message) from None
            self.metrics.reloads.labels("done").inc()
            return self.loaded

    # State

    @property
    def ending(self) -> bool:
        """Whether the service is stopping, or has failed and is about to."""
        return self.stopping or self.failure is not None

    @property
    def loaded(self) -> Loaded:
        """The bundle that answers.

        Raises:
            ServiceError: it is not loaded yet.
        """
        if self._loaded is None:
            raise ServiceError(503, "not_ready", "The bundle is being loaded.", 2)
        return self._loaded

    def _model(self) -> RoutingModel:
        return self.loaded.model

    @property
    def writer(self) -> TextWriter:
        """What writes texts; made when the first one is asked for."""
        if self._writer is None:
            self._writer = TextWriter(
                lambda: cast(Generative, self._model()), size=self.settings.batch_size, limit=self.settings.queue,
                sessions=self._sessions, begin=self._set_threads, hear=self.metrics.batch, died=self._died,
            )  # fmt: skip
        return self._writer

    @property
    def waiting(self) -> int:
        """Inputs and prompts in the queues, and images that are decoded."""
        asked = self._batcher.waiting + self._decoder.inputs if self._batcher and self._decoder else 0
        return asked + (self._writer.waiting if self._writer else 0)

    # Answers

    async def answer(
        self,
        request: Request,
        items: Sequence[Any],
        choice: BatchKey,
        top: int,
        deadline: float,
        session: str | None = None,
    ) -> list[Outcome]:
        """Answer the inputs of a request, whose body has been read.

        Raises:
            ServiceError: there is no room, or no time left.
            ClientGone: nobody waits for the answer any more.
        """
        outcomes = await self.finished(request, self._answer(items, choice, top, deadline, session), deadline)
        self.count([outcome.result for outcome in outcomes])
        return outcomes

    async def finished(self, request: Request, work: Coroutine[Any, Any, _R], deadline: float) -> _R:
        """What some work for a request gives; it is cancelled where nobody waits for it, or its time is over.

        Raises:
            ServiceError: no time is left, or the service stops.
            ClientGone: nobody waits for the answer any more.
        """
        task = asyncio.create_task(work)
        gone = asyncio.ensure_future(disconnected(request))
        try:
            with self.under_way(task):
                async with asyncio.timeout_at(deadline):
                    waits: set[asyncio.Future[Any]] = {task, gone}
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            assert self._batcher is not None
            message = f"No answer within {self.settings.timeout:g} s."
            raise ServiceError(503, "timeout", message, self._batcher.retry_after()) from None
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
        if not task.done():
            raise ClientGone
        if task.cancelled():
            raise ServiceError(503, "stopping", "The service is stopping and can no longer answer.", 5)
        return task.result()

    @contextmanager
    def under_way(self, work: asyncio.Task[Any]) -> Iterator[None]:
        """Inside, `give_up` cancels this work."""
        self._under_way.add(work)
        try:
            yield
        finally:
            self._under_way.discard(work)

    def count(self, results: list[Prediction | Fault]) -> None:
        """Note what became of inputs."""
        self.metrics.count(results)
        self.traffic.count(results)

    async def _answer(
        self, items: Sequence[Any], choice: BatchKey, top: int, deadline: float, session: str | None
    ) -> list[Outcome]:
        assert self._batcher is not None and self._decoder is not None
        model = self._model()
        if model.takes_images:
            if self.waiting + len(items) > self.settings.queue:  # what is decoded takes more memory than its bytes
                message = f"{self.waiting} inputs are waiting; the limit is {self.settings.queue}."
                raise ServiceError(503, "full", message, self._batcher.retry_after())
            items = await self._decoder.read(items, model)
        if session is not None:
            items = [InSession(item, session) for item in items]
        left = deadline - asyncio.get_running_loop().time()
        # Half of the time: how long the queue takes is a guess, and an answer that comes too late is work for nothing.
        job = self._batcher.submit(items, choice, top, left / 2)
        try:
            return await job.done
        except asyncio.CancelledError:
            self._batcher.cancel(job)
            raise


async def _in_daemon(function: Callable[[], _R]) -> _R:
    """What a function gives, from a thread that the process does not wait for when it ends."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[_R] = loop.create_future()

    def settle(result: _R | None, error: BaseException | None) -> None:
        """Hand result or error to who waits, in the event loop."""
        if found.done():
            return
        if error is None:
            found.set_result(result)  # type: ignore[arg-type]
        else:  # what is no Exception would end the event loop
            found.set_exception(error if isinstance(error, Exception) else MassError(f"it ended by {error!r}"))

    def run() -> None:
        """Call the function, and hand over what comes of it."""
        result, fault = None, None
        try:
            result = function()
        except BaseException as error:
            fault = error
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, result, fault)

    Background(run, lambda: None, LOADER).start()
    return await found


async def disconnected(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
