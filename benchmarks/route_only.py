"""What routing in front of another server costs: `python benchmarks/route_only.py BUNDLE`.

A stand-in for the server answers at once, so all that is measured is the way to it: the same requests straight to it, and
through `mass serve --upstream` with the task found and with the task named. Rounds are interleaved, one request at a time.
Memory is that of the process, of the whole service and of the one that only routes, after the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve_client import Connection, Served, serving

TEXTS = [
    "Is this message spam? Win a free prize now, call this number before midnight.",
    "Which department should answer: my invoice of March was charged twice, please help.",
    "The film is slow and the actors seem bored, yet the last scene stays with you for days.",
    "Write a short title: the council voted on Tuesday to close the old bridge for repairs until spring.",
]
_ANSWER = json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "x", "choices": []}).encode()


async def answer_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection of the stand-in."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            start = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(_ANSWER)}\r\n\r\n"
            writer.write(start.encode() + _ANSWER)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def measured(url: str, served: Served, tasks: list[str], count: int) -> dict[str, Any]:
    """Milliseconds of each way, and CPU milliseconds of the router for each request that it routes."""
    ways: dict[str, tuple[Connection, Callable[[int], str | None]]] = {
        "straight": (Connection(url), lambda i: tasks[0]),
        "task named": (Connection(served.url), lambda i: tasks[i % len(tasks)]),
        "task found": (Connection(served.url), lambda i: None),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    work: dict[str, float] = dict.fromkeys(ways, 0.0)
    for i in range(-4, count):
        for name, (connection, model) in ways.items():
            body = {"messages": [{"role": "user", "content": TEXTS[i % len(TEXTS)]}], "model": model(i)}
            before, began = served.work, time.perf_counter()
            status, content = await connection.post("/v1/chat/completions", json.dumps(body).encode())
            took = time.perf_counter() - began
            assert status == 200, (name, status, content)
            if i >= 0:  # the first rounds are warm-up
                times[name].append(1000 * took)
                work[name] += served.work - before
    return {
        name: {
            "median ms": round(statistics.median(values), 2),
            "p95 ms": round(sorted(values)[int(0.95 * (len(values) - 1))], 2),
            "router's CPU ms": round(1000 * work[name] / count, 2),
        }
        for name, values in times.items()
    }


async def run(bundle: str, count: int, threads: str) -> None:
    """Both measurements."""
    server = await asyncio.start_server(answer_at_once, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    tasks = [path.name for path in sorted((Path(bundle) / "tasks").iterdir())]
    async with server:
        for mapped in ([], ["--mapped"]):
            options = [bundle, "--threads", threads, *mapped]
            with serving(*options, "--upstream", url) as served:
                begun = served.memory
                found = await measured(url, served, tasks, count)
                part = (begun, served.memory)
            for name, figures in found.items():
                print(f"{'mapped, ' if mapped else ''}{name}: {figures}", flush=True)
            with serving(*options) as served:
                begun, connection = served.memory, Connection(served.url)
                for i in range(2 * count):
                    asked = json.dumps({"inputs": TEXTS[i % len(TEXTS)]}).encode()
                    assert (await connection.post("/v1/route", asked))[0] == 200
                whole = (begun, served.memory)
            words = "at the start {:.0f} MB, after the requests {:.0f} MB"
            kind = "mapped, " if mapped else ""
            print(f"{kind}memory: only routing {words.format(*part)}; whole service {words.format(*whole)}", flush=True)


def main() -> None:
    """Measure a bundle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--threads", default="1")
    given = parser.parse_args()
    asyncio.run(run(given.bundle, given.requests, given.threads))


if __name__ == "__main__":
    main()
