"""Ten thousand requests that are wrong: `python benchmarks/serve_malformed.py`.

A quarter is made by schemathesis from the service's own description (`pip install 'massmerge[bench]'`), the rest is random
bytes under every content type, bodies that blow up when they are read, and requests that are hardly HTTP. None may get a
5xx other than 503, the service must answer afterwards, and its memory must stand still.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import random
import socket
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from serve_client import Served, serving

SUITES = Path.home() / ".cache" / "massmerge" / "suites"
KINDS = (
    "application/json",
    "multipart/form-data; boundary=x",
    "image/png",
    "text/plain",
    "application/x-www-form-urlencoded",
    "",
)
CHAT = ("/v1/chat/completions", "/v1/completions", "/v1/route")
PATHS = ("/v1/predict", "/", "/v1/tasks", "/admin/reload", "/nothing", "/%00", "/../..", "/v1/predict?x=%ff")
Statuses = Counter[int]


def from_the_description(served: Served, count: int, seed: int) -> Statuses:
    """Requests that schemathesis makes from the description: right ones, and ones that break it."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    found: Statuses = Counter()
    ways = list(product([result.ok() for result in schema.get_all_operations()], schemathesis.GenerationMode))
    for turn in itertools.count():
        before = sum(found.values())
        options = settings(
            max_examples=-(-(count - before) // len(ways)),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        for operation, mode in ways:

            @seeded(seed + 1000 * turn)
            @options
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: schemathesis.Case) -> None:
                if sum(found.values()) < count:
                    found[case.call(base_url=served.url).status_code] += 1

            try:
                send()
            except Exception as error:  # nothing in an operation can be broken, such as one without parameters
                if turn == 0:
                    print(f"{operation.label}, {mode.value}: {type(error).__name__}")
        # Operations without parameters have one request to make; those with a body make up for them in the next turn.
        if sum(found.values()) in (before, count):
            break
    return found


def random_bodies(served: Served, count: int, seed: int) -> Statuses:
    """Random bytes, and right bodies with bytes changed, under every content type."""
    right = {"inputs": ["win a free prize now", {"text": "a"}], "top_k": 2, "explain": True}
    return changed_bodies(served, count, seed, [right], PATHS)


def random_chats(served: Served, count: int, seed: int) -> Statuses:
    """The same for services that write."""
    same = {"max_tokens": 3, "temperature": 0.5, "seed": 1, "stop": ["x"]}
    chat = {"messages": [{"role": "user", "content": "win a free prize now"}], "stream": True, "logprobs": True, **same}
    return changed_bodies(served, count, seed, [chat, {"prompt": "win a free prize", "logprobs": 2, **same}], CHAT)


def changed_bodies(
    served: Served, count: int, seed: int, rights: list[dict[str, object]], paths: tuple[str, ...]
) -> Statuses:
    """Random bytes, and these bodies with bytes changed."""
    source = random.Random(seed)
    found: Statuses = Counter()
    with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as client:
        for _ in range(count):
            body = bytearray(json.dumps(source.choice(rights)).encode())
            for _ in range(source.randint(1, 8)):
                body[source.randrange(len(body))] = source.randrange(256)
            content = bytes(body) if source.random() < 0.5 else source.randbytes(source.randrange(2000))
            method, kind = source.choice(("POST", "POST", "POST", "GET", "PUT")), source.choice(KINDS)
            answer = client.request(method, source.choice(paths), content=content, headers={"Content-Type": kind})
            found[answer.status_code] += 1
    return found


def png(width: int, height: int, data: bytes) -> str:
    """An image that says what it likes of its size, as base64."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return base64.b64encode(file).decode()


def bombs() -> Iterator[tuple[bytes, str]]:
    """Bodies that grow when they are read, with their content type."""
    zeros = bytes(3_000_000)
    image = [png(60_000, 60_000, zeros), png(2**31 - 1, 1, b""), png(1000, 1000, zeros), png(6000, 6000, zeros)]
    deep = [b"[" * 100_000, b'{"inputs":' * 50_000, b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}"]
    many = {str(number): number for number in range(20_000)}
    long = [{"inputs": "a " * 200_000}, {"inputs": ["a"] * 50_000}, {"inputs": "\u0000\ud7ff\uffff" * 1000}]
    long += [{"inputs": "a", "tasks": ["x" * 1000] * 900}, {"inputs": {"text": "a", **many}}]
    part = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\nno image\r\n'
    forms = [
        part * 2000 + b"--x--\r\n",
        part * 100 + b"--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; name="' + b"n" * 90_000,
    ]
    while True:
        for text in image:
            yield json.dumps({"inputs": {"image": text}}).encode(), KINDS[0]
            yield base64.b64decode(text), KINDS[2]
        for content in deep:
            yield content, KINDS[0]
        for body in long:
            yield json.dumps(body).encode(), KINDS[0]
        for form in forms:
            yield form, KINDS[1]
        yield b'{"inputs": 1' + b"0" * 100_000 + b"}", KINDS[0]
        yield b" " * 21_000_000, KINDS[0]


def chat_bombs() -> Iterator[tuple[bytes, str]]:
    """The same for services that write."""
    said = {"role": "user", "content": "a"}
    bodies: list[dict[str, object]] = [
        {"messages": [{**said, "content": "a " * 200_000}]}, {"messages": [said] * 20_000}, {"messages": [said] * 9000},
        {"messages": [{**said, "content": [{"type": "text", "text": "a"}] * 50_000}]},
        {"messages": [{**said, "role": "r" * 60}]}, {"messages": [said], "stop": ["x" * 200] * 16},
        {"messages": [said], "stop": ["x"] * 5000}, {"messages": [said], "seed": 2**80}, {"messages": [said], "seed": -1},
        {"messages": [said], "max_tokens": 10**30}, {"messages": [said], "temperature": 1e-300},
        {"messages": [said], "temperature": 2, "top_p": 1e-9, "top_k": 10**9, "min_p": 1.0},
        {"messages": [said], "repetition_penalty": 1e-300}, {"prompt": [2**62]}, {"prompt": [0] * 90_000},
        {"prompt": "\u0000\ud7ff\uffff" * 1000}, {"prompt": "a", "logprobs": 20, "stop": "\u0000"},
    ]  # fmt: skip
    while True:
        for body in bodies:
            yield json.dumps(body).encode(), KINDS[0]
        yield b'{"messages":' + b"[" * 100_000, KINDS[0]
        yield b" " * 21_000_000, KINDS[0]


def growing_chats(served: Served, count: int, seed: int) -> Statuses:
    """Endless conversations, numbers beyond all limits."""
    found: Statuses = Counter()
    for path in CHAT[:2]:
        found += sent_bodies(served, path, islice(chat_bombs(), count // 2 + 1))
    return found


def growing_bodies(served: Served, count: int, seed: int) -> Statuses:
    """Deep and endless JSON, images of billions of pixels, forms of thousands of files."""
    return sent_bodies(served, "/v1/predict", islice(bombs(), count))


def sent_bodies(served: Served, path: str, bodies: Iterator[tuple[bytes, str]]) -> Statuses:
    """What is answered to bodies."""
    found: Statuses = Counter()
    with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as client:
        for content, kind in bodies:
            try:
                status = client.post(path, content=content, headers={"Content-Type": kind}).status_code
            except httpx.TransportError:  # refused, and closed before all of it had been sent
                status = 0
            found[status] += 1
    return found


def hardly_http(served: Served, count: int, seed: int) -> Statuses:
    """Huge headers, thousands of them, lines that are no requests, lengths that lie, connections that break off."""
    source, address = random.Random(seed), urlsplit(served.url)
    post = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    makers: list[Callable[[], bytes]] = [
        lambda: b"GET / HTTP/1.1\r\nX: " + b"a" * source.randrange(200_000) + b"\r\n\r\n",
        lambda: b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * source.randrange(8000) + b"\r\n",
        lambda: b"GET /" + b"a" * source.randrange(200_000) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        lambda: source.randbytes(source.randrange(1, 4000)),
        lambda: post + b"Content-Length: 99999999999999999999\r\n\r\n{}",
        lambda: post + b"Content-Length: -1\r\n\r\n{}",
        lambda: post + b"Content-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        lambda: post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + source.randbytes(50),
        lambda: post + b"Content-Length: 1000\r\n\r\n{",
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        lambda: b"GET /v1/predict HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    ]
    found: Statuses = Counter()
    for number in range(count):
        try:
            with socket.create_connection((address.hostname or "", address.port or 0), 10) as connection:
                connection.sendall(makers[number % len(makers)]())
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(200)
                found[int(answer.split(b" ")[1]) if answer.startswith(b"HTTP/1.1 ") else 0] += 1
        except OSError:
            found[0] += 1  # the service closed the connection
    return found


def run(
    served: Served,
    name: str,
    shares: dict[Callable[[Served, int, int], Statuses], int],
    right: dict[str, object],
    path: str = "/v1/predict",
) -> bool:
    """All kinds of requests against one service; whether it stood them."""
    found: Statuses = Counter()
    for kind, count in shares.items():
        kind(served, max(20, count // 50), 1)  # what is loaded on first use is no growth
    before = served.memory
    asked = 0
    for kind, count in shares.items():
        asked += count
        statuses = kind(
            served, asked - sum(found.values()), 2
        )  # schemathesis may find less to break than it was asked for
        print(f"{name}: {kind.__name__} {dict(sorted(statuses.items()))}, memory {served.memory:.0f} MB", flush=True)
        found += statuses
    grown = served.memory - before
    alive = httpx.post(served.url + path, json=right, trust_env=False, timeout=60).status_code == 200
    wrong = {status: count for status, count in found.items() if status >= 500 and status != 503}
    holds = not wrong and alive and grown <= 100
    measured = (
        f"5xx other than 503: {sum(wrong.values())}; alive: {alive}; memory {before:.0f} MB before, {grown:+.0f} MB"
    )
    bound = "0; alive; stable"
    print(f"| {name}: {sum(found.values())} requests | {measured} | {bound} | {'holds' if holds else '**missed**'} |")
    return holds


def main() -> None:
    """Text and images, and a bundle that writes where there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--text", type=Path, default=SUITES / "text" / "bundles" / "core")
    parser.add_argument("--images", type=Path, default=SUITES / "vision" / "bundles" / "core")
    parser.add_argument("--writer", type=Path, default=SUITES / "llm" / "bundles" / "chat")
    given = parser.parse_args()
    count = given.requests
    text = {
        from_the_description: count // 4,
        random_bodies: count * 3 // 10,
        growing_bodies: count // 20,
        hardly_http: count // 4,
    }
    images = {random_bodies: count // 10, growing_bodies: count - sum(text.values()) - count // 10}
    chats = {from_the_description: count // 10, random_chats: count // 5, growing_chats: count // 50}
    holds = []
    if given.text.exists():
        with serving(str(given.text), "--threads", "1") as served:
            holds.append(run(served, "text", text, {"inputs": "win a free prize now"}))
    if given.images.exists():
        with serving(str(given.images), "--threads", "1") as served:
            holds.append(run(served, "images", images, {"inputs": png(64, 64, bytes(64 * 193))}))
    if given.writer.exists():
        with serving(str(given.writer), "--threads", "1", "--max-new-tokens", "4") as served:
            right: dict[str, object] = {"prompt": "win a free prize now", "max_tokens": 2}
            holds.append(run(served, "writer", chats, right, "/v1/completions"))
    if not holds:
        sys.exit("there is no bundle: give --text, --images or --writer.")
    sys.exit(0 if all(holds) else 1)


if __name__ == "__main__":
    main()
