"""S3 on this machine: moto's server, behind a proxy that throttles and cuts answers as a real store does."""

import http.client
import itertools
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

_SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_OWN = {"transfer-encoding", "connection", "content-length", "date", "server"}


class Proxy(BaseHTTPRequestHandler):
    """Hands requests on; counts the bytes of objects, and spoils some answers to GET."""

    protocol_version = "HTTP/1.1"
    behind = ("", 0)
    throttle_every = 0
    cut_every = 0
    number: ClassVar[Iterator[int]] = itertools.count(1)
    asked: ClassVar[list[str]] = []
    sent = 0
    spoilt = 0

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        kind = type(self)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind.asked.append(f"{self.command} {self.path} {self.headers.get('Range')}")
        reads = self.command == "GET" and "?" not in self.path  # an object, not a listing
        number = next(kind.number) if reads else 0
        if reads and kind.throttle_every and number % kind.throttle_every == 0:
            kind.spoilt += 1
            self._answer(503, [("Content-Type", "application/xml")], _SLOW_DOWN)
            return
        connection = http.client.HTTPConnection(*kind.behind, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            data, headers = answer.read(), answer.getheaders()
        finally:
            connection.close()
        if self.command == "HEAD":
            self._answer(answer.status, headers, b"", length=answer.getheader("Content-Length"))
        elif reads and kind.cut_every and number % kind.cut_every == 0 and len(data) > 1:
            kind.spoilt += 1
            self._answer(answer.status, headers, data[: len(data) // 2], length=str(len(data)))
            self.close_connection = True
        else:
            kind.sent += len(data) if reads else 0
            self._answer(answer.status, headers, data)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, length: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _OWN:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)) if length is None else length)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def s3_server() -> Iterator[tuple[str, type[Proxy]]]:
    """An empty store: the address of the proxy, and its handler, which counts and spoils."""
    from moto.server import ThreadedMotoServer

    store = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    store.start()
    host, port = store.get_host_and_port()
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", b"").close()  # its state is the process's
    kind = type("Handler", (Proxy,), {"behind": (host, port), "asked": [], "number": itertools.count(1)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads, server.handle_error = True, lambda *_: None  # clients hang up
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", kind
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
        store.stop()
