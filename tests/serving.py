"""Services to test: the real command in a process of its own, and the application with a model that can be held up."""

import io
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx

from commands import _context
from massmerge.errors import InputError
from massmerge.model.answers import Answer, Prediction, Routing
from massmerge.serve import service
from massmerge.serve.app import make_app
from massmerge.serve.loaded import Loaded
from massmerge.serve.server import Server, make_server
from massmerge.serve.settings import ServiceSettings

KEY = "a-key-for-tests-only"
JSON = {"Content-Type": "application/json"}


def run_server(arguments: list[str], output: str, prepare=None) -> None:
    """The command, with what it prints and logs in a file; `prepare` runs first in its process."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(number, "wb", 0), write_through=True) for number in (1, 2))
    from massmerge.cli.main import main

    if prepare:
        prepare()
    main(arguments)


@dataclass
class Running:
    """A command that serves."""

    process: object
    output: Path
    client: httpx.Client

    @property
    def url(self) -> str:
        return str(self.client.base_url)

    def predict(self, inputs, **options) -> httpx.Response:
        return self.client.post("/v1/predict", json={"inputs": inputs, **options})

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> int:
        """End it as a supervisor does; returns its exit code."""
        if self.process.is_alive():
            self.signal(signal.SIGTERM)
        self.process.join(30)
        return self.process.exitcode


def start_server(*arguments: object, wait: bool = True, prepare=None) -> Running:
    """Start `mass serve` on a free port of this machine."""
    output = Path(tempfile.mkstemp(suffix=".log")[1])
    words = ["serve", *map(str, arguments), "--port", "0", "--json", "--threads", "1", "--log-format", "json"]
    process = _context.Process(target=run_server, args=(words, str(output), prepare))
    process.start()
    if not wait:
        return Running(process, output, None)
    line = wait_for(lambda: next((x for x in output.read_text().splitlines() if '"url": "http' in x), None) or (
        not process.is_alive() and output.read_text() + "ended"))  # fmt: skip
    assert not line.endswith("ended"), line
    return Running(process, output, httpx.Client(base_url=json.loads(line)["url"], timeout=30, trust_env=False))


@contextmanager
def serving(*arguments: object, prepare=None):
    running = start_server(*arguments, prepare=prepare)
    try:
        yield running
    finally:
        running.client.close()
        assert running.stop() == 0, running.output.read_text()
        running.output.unlink()


def wait_for(found, seconds: float = 60.0):
    """What a function gives once it gives something."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
    return value


class FakeModel:
    """Answers `spam` to everything, when its gate is open. `bad` cannot be read, `poison` cannot be answered."""

    takes_images = False
    core = SimpleNamespace(reader=SimpleNamespace(processor=None))

    def __init__(self, name: str = "first") -> None:
        self.tasks = ["spam", "topic"]
        self.name, self.gate, self.batches = name, threading.Event(), []
        self.gate.set()

    def read(self, item):
        if item == "bad":
            raise InputError("cannot be read.")
        if item == "odd":
            raise ZeroDivisionError(f"a library's own words about {item}")
        return item

    def route(self, rows, *, task=None, batch_size=32, session=None, memory=None):
        """Of every text the first word is its task, `none` that of no task."""
        self.sessions = None if session is None else (list(session), memory)
        self.batches.append((list(rows), task, "route", 0))
        assert self.gate.wait(30)
        if "poison" in rows:
            raise RuntimeError("poison in the batch")
        words = [str(row).split()[0] for row in rows]
        selected = [word if word in self.tasks else self.tasks[0] for word in words]
        shares = [{task: 0.9 if task == chosen else 0.1 for task in self.tasks} for chosen in selected]
        return [
            Routing(share, share, [] if word == "none" else [chosen], "M0.mean", probabilities=share)
            for word, chosen, share in zip(words, selected, shares, strict=True)
        ]

    def predict(
        self, rows, *, task=None, route="input", top=3, batch_size=32, on_error="raise", session=None, memory=None
    ):
        self.sessions = None if session is None else (list(session), memory)
        self.batches.append((list(rows), task, route, top))
        assert self.gate.wait(30)
        if "poison" in rows:
            raise RuntimeError("poison in the batch")
        timings = {"first pass": 1.0, "second pass": 2.0, "inputs": len(rows)}
        routing = Routing({"spam": -1.0, "topic": 1.0}, {"spam": 0.9, "topic": 0.1}, ["spam"], "M0.mean", 2.0, 1.0)
        return [
            Prediction("spam", self.name, 0.7, 1.0, [Answer("spam", "ham", 0.3, 0.0)][: top - 1], routing, timings)
            for _ in rows
        ]


def error_of(response: httpx.Response) -> tuple[int, str]:
    """Status and code of a refusal, which tells nothing of the code behind it."""
    body = response.json()
    assert set(body["error"]) == {"code", "message"}
    assert "Traceback" not in response.text and ".py" not in response.text
    return response.status_code, body["error"]["code"]


@dataclass
class Held:
    """The application around a fake model, on a socket."""

    model: FakeModel
    app: object
    client: httpx.Client
    address: tuple[str, int]
    server: Server

    @property
    def service(self) -> service.Service:
        return self.app.state.service

    def predict(self, inputs, **options) -> httpx.Response:
        return self.client.post("/v1/predict", json={"inputs": inputs, **options})

    def metric(self, line: str) -> float:
        """The value of a line of /metrics."""
        text = self.client.get("/metrics").text
        return next((float(x.rpartition(" ")[2]) for x in text.splitlines() if x.startswith(f"{line} ")), 0.0)


def loaded(model: FakeModel, answers: str = "labels") -> Loaded:
    return Loaded(model, SimpleNamespace(tasks=()), {}, [], time.time(), answers)


@contextmanager
def holding(monkeypatch, model: FakeModel | None = None, load=None, bundle: Path | None = None, **options):
    """Serve a fake model, or a real bundle, from a thread; `load` stands for the loading of the bundle."""
    model = model or FakeModel()
    answers = "tasks" if options.get("route_only") else "labels"
    if bundle is None:
        monkeypatch.setattr(service, "load_bundle", load or (lambda settings: loaded(model, answers)))
    settings = ServiceSettings(bundle or Path("bundle"), **{"batch_wait": 0.0, "grace": 5.0, **options})
    app = make_app(settings)
    server = make_server(app, settings)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    address = listener.getsockname()
    headers = {"X-API-Key": options["api_key"].decode()} if options.get("api_key") else {}
    client = httpx.Client(base_url=f"http://127.0.0.1:{address[1]}", headers=headers, timeout=30, trust_env=False)
    try:
        wait_for(lambda: server.started)
        if load is None:
            wait_for(lambda: client.get("/ready").status_code == 200)
        yield Held(model, app, client, address, server)
    finally:
        model.gate.set()
        client.close()
        server.should_exit = True
        thread.join(20)
        logging.getLogger("uvicorn.error").handlers.clear()
        assert not thread.is_alive()
