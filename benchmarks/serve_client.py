"""A load on a service, from a process of its own: clients that wait for their answers, or requests at a fixed rate.

Written on bare sockets: a client library would take more of the machine than the server that is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil


@dataclass(frozen=True)
class Served:
    """A service that was started here."""

    url: str
    process: psutil.Process

    @property
    def memory(self) -> float:
        """Resident memory in MB."""
        return self.process.memory_info().rss / 1e6

    @property
    def work(self) -> float:
        """Seconds of all cores that it has used."""
        times = self.process.cpu_times()
        return times.user + times.system


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """`mass serve` on a free port, stopped by its own pid."""
    command = [sys.executable, "-c", "from massmerge.cli.main import main; main()", "serve", *arguments]
    with subprocess.Popen([*command, "--port", "0", "--json", "-q"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Served(json.loads(process.stdout.readline())["url"], psutil.Process(process.pid))
        finally:
            process.terminate()
        code = process.wait(60)
        assert code == 0, f"the service ended with {code}"


@dataclass
class Load:
    """What became of the requests."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    """By status of HTTP; 0 where the connection failed."""
    latencies: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of each request, by status."""

    in_time: int = 0
    """Answers while requests were still being sent."""

    def note(self, status: int, seconds: float) -> None:
        """Add a request."""
        self.statuses[status] += 1
        self.latencies.setdefault(status, []).append(seconds)

    @property
    def rate(self) -> float:
        """Answers in a second."""
        return self.statuses[200] / self.seconds

    def quantile(self, status: int, share: float) -> float:
        """Milliseconds within which that share of the requests of a status was done."""
        ordered = sorted(self.latencies.get(status, [0.0]))
        return 1000 * ordered[int(share * (len(ordered) - 1))]


class Connection:
    """A connection that is kept between requests."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body; status 0 where the connection fails. A kept one may have been closed meanwhile."""
        for kept in (True, False) if self._streams else (False,):
            try:
                return await self._post(path, body)
            except (OSError, asyncio.IncompleteReadError, ValueError, IndexError):
                self.close()
                if not kept:
                    break
        return 0, b""

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._address.hostname, self._address.port)
        reader, writer = self._streams
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        content = b""
        if b"content-length:" in answer:
            content = await reader.readexactly(int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0]))
        else:  # it comes in chunks
            while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
                content += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        if b"connection: close" in answer:
            self.close()
        return int(answer.split(b" ", 2)[1]), content

    def close(self) -> None:
        """Give the connection up."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def bodies(texts: list[str]) -> list[bytes]:
    """One request's body for each text."""
    return [json.dumps({"inputs": text}).encode() for text in texts]


def in_own_process(load: str, url: str, texts: list[str], *arguments: float) -> Load:
    """Run `clients` or `flood` where it shares no interpreter with anything that is measured."""
    given = json.dumps([load, url, texts, arguments])
    done = subprocess.run([sys.executable, __file__], input=given, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    latencies = {int(status): times for status, times in found["latencies"].items()}
    return Load(found["seconds"], Counter({s: len(t) for s, t in latencies.items()}), latencies, found["in_time"])


def _run(load: Callable[..., Any], url: str, texts: list[str], *arguments: float) -> Load:
    return asyncio.run(load(url, bodies(texts), *arguments))


async def clients(url: str, requests: list[bytes], count: int, seconds: float) -> Load:
    """So many clients, each of which sends its next request when it has the answer to the last."""
    load, source = Load(), itertools.cycle(requests)
    began = time.perf_counter()

    async def client() -> None:
        connection = Connection(url)
        while time.perf_counter() - began < seconds:
            sent = time.perf_counter()
            status, _ = await connection.post("/v1/predict", next(source))
            load.note(status, time.perf_counter() - sent)
        connection.close()

    await asyncio.gather(*(client() for _ in range(int(count))))
    load.seconds = time.perf_counter() - began
    return load


async def flood(url: str, requests: list[bytes], rate: float, seconds: float) -> Load:
    """Requests at a fixed rate, whatever becomes of them."""
    load, source, idle, tasks = Load(), itertools.cycle(requests), list[Connection](), set[asyncio.Task[None]]()
    began = time.perf_counter()

    async def one() -> None:
        connection = idle.pop() if idle else Connection(url)
        sent = time.perf_counter()
        status, _ = await connection.post("/v1/predict", next(source))
        load.note(status, time.perf_counter() - sent)
        idle.append(connection)

    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    load.seconds = time.perf_counter() - began  # the offered load ends here; what is still under way is waited for
    load.in_time = load.statuses[200]
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return load


if __name__ == "__main__":
    name, *rest, numbers = json.load(sys.stdin)
    done = _run({"clients": clients, "flood": flood}[name], *rest, *numbers)
    print(json.dumps({"seconds": done.seconds, "latencies": done.latencies, "in_time": done.in_time}))
