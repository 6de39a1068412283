"""What clients, libraries and disks can do to a service: it goes on, or says that it does not and ends."""

import base64
import io
import json
import os
import resource
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from PIL import Image

from massmerge.serve import connections, service, worker
from models import text_bundle
from serving import FakeModel, holding, serving, start_server, wait_for

BODY = b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n{"


def closed(connection: socket.socket) -> bool:
    """Whether the service has closed a connection."""
    connection.setblocking(False)
    try:
        return connection.recv(65536) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.fixture
def connect():
    """Makes connections that are closed in the end."""
    made = []

    def connect(address, sent: bytes = b"") -> socket.socket:
        made.append(socket.create_connection(address, 10))
        made[-1].sendall(sent)
        return made[-1]

    yield connect
    for connection in made:
        connection.close()


# Connections


def test_headers_that_come_drop_by_drop_and_connections_without_a_request_are_closed(monkeypatch, connect):
    monkeypatch.setattr(connections, "HEADERS", 0.5)
    with holding(monkeypatch) as held:
        slow = [connect(held.address, b"GET /health HTTP/1.1\r\nX: ") for _ in range(50)]
        idle = [connect(held.address) for _ in range(10)]
        end = time.monotonic() + 10
        while not all(closed(one) for one in slow):
            assert time.monotonic() < end
            for one in slow:
                try:
                    one.send(b"a")
                except OSError:
                    continue
            time.sleep(0.05)
        wait_for(lambda: all(closed(one) for one in idle), 10)
        assert held.predict("a").status_code == 200


def test_a_kept_connection_is_given_the_same_time_for_its_next_headers(monkeypatch, connect):
    monkeypatch.setattr(connections, "HEADERS", 0.3)
    with holding(monkeypatch) as held:
        kept = connect(held.address, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(65536).startswith(b"HTTP/1.1 200")
        time.sleep(0.5)  # an idle one may wait for longer
        assert not closed(kept)
        kept.send(b"GET /health HTTP")
        wait_for(lambda: closed(kept), 10)


def test_the_connection_that_has_waited_for_the_longest_makes_room_and_none_that_is_answered(monkeypatch, connect):
    with holding(monkeypatch, max_connections=10) as held, ThreadPoolExecutor(1) as pool:
        held.model.gate.clear()
        under_way = pool.submit(httpx.post, f"{held.client.base_url}/v1/predict", json={"inputs": "a"}, timeout=30)
        wait_for(lambda: held.model.batches)
        others = [connect(held.address, sent) for sent in (b"", b"GET / HT", BODY) * 20]
        wait_for(lambda: sum(closed(one) for one in others) >= 50)
        assert len(held.server.server_state.connections) <= 10
        assert httpx.get(f"{held.client.base_url}/health").status_code == 200
        held.model.gate.set()
        assert under_way.result().status_code == 200


def test_an_answer_that_nobody_reads_does_not_keep_its_connection(monkeypatch, connect):
    monkeypatch.setattr(connections, "UNREAD", 0.3)
    with holding(monkeypatch) as held:
        held.client.close()
        wait_for(lambda: not held.server.server_state.connections)
        connect(held.address, b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        assert wait_for(lambda: held.server.server_state.connections)
        assert wait_for(lambda: not held.server.server_state.connections, 20)


def test_a_body_that_does_not_arrive_takes_no_place_of_a_request(monkeypatch, connect):
    with holding(monkeypatch, max_requests=2) as held:
        for _ in range(5):
            connect(held.address, BODY)
        wait_for(lambda: held.metric("mass_active_requests") == 6)
        assert held.predict("a").status_code == 200


def few_handles() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (72, 72))


def test_more_connections_than_file_handles_do_not_stop_the_service(root, connect):
    with serving(text_bundle(root), prepare=few_handles) as running:
        address = ("127.0.0.1", running.client.base_url.port)
        for number in range(150):
            connect(address, b"" if number % 2 else b"GET / HTTP/1.1\r\nX: ")
        with httpx.Client(base_url=running.url, timeout=5, trust_env=False) as client:
            answers = [client.post("/v1/predict", json={"inputs": "vote on the law"}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3


def test_limits_leave_file_handles_to_others(monkeypatch):
    used = len(list(Path("/dev/fd").iterdir()))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (used + 200, used + 200))
    limit, backlog = connections.connection_limits(1000)
    assert 100 < limit + backlog <= 200 - 40 and backlog >= 16
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert connections.connection_limits(1000)[0] == 1000


def test_made_up_methods_and_paths_make_no_figures(monkeypatch, connect):
    with holding(monkeypatch) as held:

        def figures() -> int:
            return len(held.client.get("/metrics").text.splitlines())

        for word in ("FIRST", "get"):
            held.client.request(word, "/health")
            held.client.request(word, "/made-up")
        figures()
        before = figures()  # with those of this question
        for number in range(30):
            held.client.request(f"M{number}", "/health")
            held.client.request(f"M{number}", f"/{number}")
        assert figures() == before


# Images


def picture(side: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class FakeImages(FakeModel):
    """Takes images; one of 50 pixels a side is read when its gate is open."""

    takes_images = True

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.read_gate = threading.Event(), threading.Event()

    def read(self, image):
        if image.width == 50:
            self.reading.set()
            assert self.read_gate.wait(30)
        return f"{image.width}"


def test_the_images_of_a_request_have_a_budget_of_pixels(monkeypatch):
    with holding(monkeypatch, FakeImages(), max_pixels=10_000, max_request_pixels=30_000) as held:
        assert held.predict([picture(100)] * 3).status_code == 200
        refused = held.predict([picture(100)] * 4)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_many_pixels")
        assert "40,000 pixels together" in refused.json()["error"]["message"]
        single = held.predict([picture(101), picture(100)]).json()["predictions"]  # what is too large is not decoded
        assert [p["error"] is None for p in single] == [False, True]
        assert [rows for rows, *_ in held.model.batches] == [["100"] * 3, ["100"]]


def test_images_that_are_decoded_hold_up_no_other_request_and_have_a_budget_together(monkeypatch):
    model = FakeImages()
    with holding(monkeypatch, model, max_held_pixels=6000, queue=8, max_items=8) as held, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(held.predict, [picture(50), picture(50)])
        assert model.reading.wait(10)
        assert held.predict(picture(10)).status_code == 200
        assert held.metric("mass_queue_length") == 2
        for refused in (held.predict(picture(40)), held.predict([picture(1)] * 7)):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "full")
        model.read_gate.set()
        assert slow.result().status_code == 200
        assert held.predict(picture(50)).status_code == 200
        assert held.metric("mass_queue_length") == 0


# Threads


class PanicException(BaseException):
    """As libraries that are written in Rust raise it."""


def test_a_panic_of_a_tokenizer_is_the_fault_of_its_input(monkeypatch):
    class Panicking(FakeModel):
        def read(self, item):
            if item == "odd":
                raise PanicException
            return item

    with holding(monkeypatch, Panicking()) as held:
        assert [p["error"] and p["error"]["code"] for p in held.predict(["odd", "a"]).json()["predictions"]] == [
            "unreadable", None]  # fmt: skip


def test_when_the_thread_that_answers_has_ended_all_requests_are_refused_and_the_service_is_not_ready(monkeypatch):
    class Ending(FakeModel):
        def predict(self, rows, **options):
            super().predict(rows, **options)
            raise SystemExit

    with holding(monkeypatch, Ending()) as held, ThreadPoolExecutor(2) as pool:
        held.model.gate.clear()
        first = pool.submit(held.predict, "a")
        wait_for(lambda: held.model.batches)
        second = pool.submit(held.predict, "b")
        wait_for(lambda: held.service.waiting == 1)
        held.model.gate.set()
        answers = [first.result(), second.result(), held.predict("c"), held.client.get("/ready")]
        assert [(a.status_code, a.json()["error"]["code"]) for a in answers] == [(503, "stopping")] * 4
        assert held.client.get("/health").status_code == 200 and held.metric("mass_ready") == 0


def test_a_thread_that_cannot_begin_is_noticed_too(monkeypatch):
    monkeypatch.setattr(service.Service, "_set_threads", lambda self: 1 / 0)
    with holding(monkeypatch, load=lambda settings: None) as held:
        wait_for(lambda: held.service.failure is not None)
        assert held.client.get("/ready").status_code == 503


def fatal_text() -> None:
    """Let one text end the thread that answers."""
    predict = worker.Worker._predict

    def ending(self, model, rows, choice, top):
        if choice.tasks == ("spam",):
            raise KeyboardInterrupt
        return predict(self, model, rows, choice, top)

    worker.Worker._predict = ending


def test_a_service_that_cannot_answer_any_more_ends_with_an_error(root):
    running = start_server(text_bundle(root), prepare=fatal_text)
    assert running.predict("a").status_code == 200
    assert running.predict("a", task="spam").status_code == 503
    running.process.join(20)
    assert running.process.exitcode == 1
    assert "The worker thread has ended (KeyboardInterrupt)" in running.output.read_text()


# Files


@pytest.fixture
def bundle(root, tmp_path):
    return shutil.copytree(text_bundle(root), tmp_path / "bundle")


def test_a_served_bundle_does_not_need_its_files(bundle):
    with serving(bundle) as running:
        texts = ["win a free prize now", "vote on the law"]
        expected = [(p["task"], p["label"]) for p in running.predict(texts).json()["predictions"]]
        for path in [p for p in bundle.rglob("*") if p.is_file()]:
            path.write_bytes(bytes(path.stat().st_size)) if "base" in str(path) else os.truncate(path, 0)
        for task in ({}, {"task": "spam"}, {"task": "topic"}, {"task": "mood"}):
            assert running.predict(texts, **task).status_code == 200
        assert [(p["task"], p["label"]) for p in running.predict(texts).json()["predictions"]] == expected
        assert running.client.get("/ready").status_code == 200


def test_a_mapped_bundle_whose_file_changes_is_not_served_any_more(bundle):
    for spoil in (lambda path: path.write_bytes(bytes(path.stat().st_size)), lambda path: os.truncate(path, 100)):
        kept = shutil.copytree(bundle, bundle.with_name("kept"))
        running = start_server(kept, "--mapped")
        assert running.predict("vote on the law").status_code == 200
        spoil(kept / "tasks/spam/factors.safetensors")
        refused = running.predict("vote on the law")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        running.process.join(20)
        assert running.process.exitcode == 2
        assert "tasks/spam/factors.safetensors: changed while it was in use" in running.output.read_text()
        shutil.rmtree(kept)


# Stopping


def test_while_it_stops_kept_connections_are_answered_and_told_to_close(root):
    running = start_server(text_bundle(root))
    kept = [HTTPConnection("127.0.0.1", running.client.base_url.port, timeout=10) for _ in range(4)]

    def ask(connection: HTTPConnection) -> tuple[int, str | None]:
        body = json.dumps({"inputs": "vote on the law"})
        connection.request("POST", "/v1/predict", body, {"Content-Type": "application/json"})
        connection.auto_open = 0
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.getheader("Connection")

    assert [ask(one) for one in kept] == [(200, None)] * 4
    running.signal(signal.SIGTERM)
    wait_for(lambda: "stopping" in running.output.read_text())
    time.sleep(0.3)  # longer than a server takes that closes what is idle
    assert [ask(one) for one in kept] == [(200, "close")] * 4
    running.process.join(20)
    assert running.process.exitcode == 0


def test_what_is_not_answered_in_the_time_of_grace_is_refused_and_the_process_ends(root):
    running = start_server(text_bundle(root), "--batch-wait", 60_000, "--grace", 2)
    with ThreadPoolExecutor(1) as pool, socket.create_connection(("127.0.0.1", running.client.base_url.port)) as slow:
        slow.sendall(BODY)
        asked = pool.submit(httpx.post, f"{running.url}/v1/predict", json={"inputs": "a"}, timeout=60)
        wait_for(lambda: "mass_queue_length 1.0" in running.client.get("/metrics").text)
        began = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - began < 8
        assert (asked.result().status_code, asked.result().json()["error"]["code"]) == (503, "stopping")


def endless_load() -> None:
    service.load_bundle = lambda settings: time.sleep(300)


def test_a_service_that_is_still_loading_stops_at_once(root):
    running = start_server(text_bundle(root), wait=False, prepare=endless_load)
    wait_for(lambda: loads(running))
    began = time.monotonic()
    assert running.stop() == 0
    assert time.monotonic() - began < 8


def loads(running) -> bool:
    """Whether the process handles signals, which it does once it serves."""
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (signal.SIGHUP - 1) & 1)
