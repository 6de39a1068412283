"""The example of `mass serve` on Ray Serve, started on a cluster."""

import importlib.util
import json
import socket
import urllib.error
import urllib.request

import pytest
from ray import serve

from clusters import TESTS
from models import text_bundle

pytestmark = pytest.mark.xdist_group("ray")  # one cluster


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ask(address: str, body: dict | None = None, key: str | None = None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(address, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_the_service_answers_on_ray_serve(cluster, root, tmp_path, monkeypatch):
    (tmp_path / "key").write_text("k" * 32)
    for name, value in {"BUNDLE": text_bundle(root), "KEY_FILE": tmp_path / "key", "CORES": 1, "REPLICAS": 2}.items():
        monkeypatch.setenv(f"MASS_{name}", str(value))
    spec = importlib.util.spec_from_file_location("ray_serve", TESTS.parent / "examples" / "serve" / "ray_serve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(module.service, route_prefix="/")
        assert ask(f"http://127.0.0.1:{port}/ready") == {"status": "ready"}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(f"http://127.0.0.1:{port}/predict", {"inputs": ["win a free phone"]})
        found = ask(f"http://127.0.0.1:{port}/predict", {"inputs": ["win a free phone"]}, "k" * 32)
        assert "spam" in json.dumps(found)
        status = serve.status().applications["default"]
        assert status.status == "RUNNING" and next(iter(status.deployments.values())).status == "HEALTHY"
    finally:
        serve.shutdown()
