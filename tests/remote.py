"""Stores that fail as real ones do: one of fsspec in memory, and a web server on this machine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from massmerge.io import addresses, remote


class Throttled(Exception):
    """As botocore's ClientError: no OSError."""


class FlakyFileSystem(MemoryFileSystem):
    """Memory that counts what is read, and throttles or cuts reads."""

    protocol = "flaky"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    asked = 0
    bytes_read = 0
    throttle_every = 0
    cut_every = 0
    puts: ClassVar[list[str]] = []
    put_fails_at = ""

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("flaky://"))

    def cat_file(self, path, start=None, end=None, **options):
        kind = FlakyFileSystem
        kind.asked += 1
        if kind.throttle_every and kind.asked % kind.throttle_every == 0:
            raise Throttled(
                "An error occurred (SlowDown) when calling the GetObject operation: Please reduce your rate."
            )
        data = super().cat_file(path, start=start, end=end, **options)
        if kind.cut_every and kind.asked % kind.cut_every == 0:
            data = data[: len(data) // 2]
        kind.bytes_read += len(data)
        return data

    def put_file(self, lpath, rpath, **options):
        if self.put_fails_at and str(rpath).endswith(self.put_fails_at):
            raise Throttled("503 SlowDown")
        FlakyFileSystem.puts.append(str(rpath))
        return super().put_file(lpath, rpath, **options)


@pytest.fixture
def flaky(monkeypatch, tmp_path):
    """The store in memory, empty, and an empty cache; pauses between attempts are left out."""
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    kind = FlakyFileSystem
    for name, value in {
        "store": {}, "pseudo_dirs": [""], "asked": 0, "bytes_read": 0, "throttle_every": 0, "cut_every": 0, "puts": [],
        "put_fails_at": "",
    }.items():  # fmt: skip
        monkeypatch.setattr(kind, name, value)
    monkeypatch.setattr(addresses, "WAITS", (0.0,) * 4)
    monkeypatch.setenv("MASS_CACHE", str(tmp_path / "cache"))
    remote._opened.cache_clear()
    return kind


def upload(folder: Path, address: str) -> None:
    """Put a folder's files below an address."""
    for path in folder.rglob("*"):
        if path.is_file():
            remote.put(path, f"{address}/{path.relative_to(folder).as_posix()}")


class _Handler(SimpleHTTPRequestHandler):
    """Files of a folder, by ranges, with an ETag; each third thing that is asked for is refused once with 503."""

    protocol_version = "HTTP/1.1"
    ranges = True
    asked: ClassVar[list[str]] = []
    sent = 0

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        kind = type(self)
        what = f"{self.command} {self.path} {self.headers.get('Range')}"
        again = what in kind.asked
        kind.asked.append(what)
        path = Path(self.translate_path(self.path))
        if len(kind.asked) % 3 == 0 and not again:
            self._answer(503, b"", {})
        elif not path.is_file():
            self._answer(404, b"", {})
        else:
            data = path.read_bytes()
            said = {"ETag": f'"{path.stat().st_mtime_ns}"'}
            asked = self.headers.get("Range") if kind.ranges else None
            if asked:
                start, stop = map(int, asked.removeprefix("bytes=").split("-"))
                said["Content-Range"] = f"bytes {start}-{stop}/{len(data)}"
                data = data[start : stop + 1]
            self._answer(206 if asked else 200, data, said)

    do_HEAD = do_GET

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            type(self).sent += len(data)
            self.wfile.write(data)


@contextmanager
def serving(folder: Path, *, ranges: bool = True) -> Iterator[tuple[str, type[_Handler]]]:
    """A web server over a folder: its address and its handler, which counts."""
    kind = type("Handler", (_Handler,), {"asked": [], "sent": 0, "ranges": ranges, "timeout": 20})
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: kind(*given, directory=str(folder)))
    server.daemon_threads, server.handle_error = True, lambda *_: None  # clients hang up
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", kind
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
