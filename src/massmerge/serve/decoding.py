"""Images are decoded before they queue, in threads of their own and within a budget of pixels: batches never wait for them.

A request's images are decoded one after the other. So requests take turns, and one image waits for as many others as there
are requests, not for all that others have sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from PIL import Image

from massmerge.model.routing_model import RoutingModel
from massmerge.serve.batching import Fault
from massmerge.serve.errors import ServiceError
from massmerge.serve.settings import ServiceSettings
from massmerge.serve.worker import Item, Read, Worker

_THREADS = 2


class Decoder:
    """Reads the images of requests.

    Args:
        worker: opens and reads one.
        settings: of the service.
        begin: runs first in each thread.
    """

    def __init__(self, worker: Worker, settings: ServiceSettings, begin: Callable[[], None]) -> None:
        self._worker, self._settings = worker, settings
        self._pool = ThreadPoolExecutor(_THREADS, "mass-images", begin)
        self._pixels = 0
        self.inputs = 0
        """Inputs that are being read."""

    async def read(self, items: Sequence[Item], model: RoutingModel) -> list[Read | Fault]:
        """The images of a request as rows of tensors.

        Raises:
            ServiceError: they have too many pixels together, or those of all requests have.
        """
        self.inputs += len(items)
        pixels = 0
        try:
            opened = await self._in_thread(lambda: [self._worker.open(item, model) for item in items])
            pixels = self._admitted(opened)
            self._pixels += pixels
            return [
                await self._in_thread(self._worker.read, item, one, model)
                for item, one in zip(items, opened, strict=True)
            ]
        finally:
            self.inputs -= len(items)
            self._pixels -= pixels

    def close(self) -> None:
        """Read nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _admitted(self, opened: list[Any]) -> int:
        """The pixels of a request's images, by their headers, if they may be decoded."""
        pixels = sum(one.width * one.height for one in opened if isinstance(one, Image.Image))
        one, all_ = self._settings.max_request_pixels, self._settings.max_held_pixels
        if pixels > one:
            message = f"The images have {pixels:,} pixels together; at most {one:,} are decoded for one request."
            raise ServiceError(413, "too_many_pixels", f"{message} Scale them down, or send fewer at once.")
        if self._pixels and self._pixels + pixels > all_:
            raise ServiceError(503, "full", f"Images with {self._pixels:,} pixels are being decoded already.", 2)
        return pixels

    async def _in_thread(self, function: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *given)
