"""The example of Ray Serve: the same API from replicas of a cluster. Its libraries are of `make test-cluster`."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import massmerge
from massmerge.errors import MassError
from massmerge.serve.service import Service
from massmerge.serve.settings import ServiceSettings
from models import text_bundle

pytest.importorskip("grpc_reflection", reason="ray[serve] is not installed: make test-cluster")
pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(
        sys.platform == "win32", reason="signals and sockets of Ray Serve are tested on Linux and macOS"
    ),
]

ROOT = Path(__file__).parents[2]
TEXTS = ["win a free phone", "a moving film", "the team scored a goal"]
KEY = "0123456789abcdef0123456789abcdef"


@contextmanager
def running(bundle, key_file=""):
    """The example as a process: what it says first, and the process."""
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets: short paths
    environment = {**os.environ, "RAY_TMPDIR": folder, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ray_serve_run.py")), str(bundle), str(key_file)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
    )  # fmt: skip
    try:
        yield said(process), process
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def said(process):
    """The next line of JSON, behind whatever Ray prints."""
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError("the process ended")


def ask(process, word):
    process.stdin.write(word + "\n")
    process.stdin.flush()
    return said(process)


@pytest.fixture(scope="module")
def service(root, tmp_path_factory):
    """The running example with a key: client and process."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text(KEY)
    with (
        running(text_bundle(root), key) as (about, process),
        httpx.Client(base_url=about["url"], headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client,
    ):
        yield client, process


def test_it_is_ready_when_it_runs_and_answers_as_the_bundle(service, root):
    client, _ = service
    assert client.get("/ready").json() == {"status": "ready"}
    found = client.post("/v1/predict", json={"inputs": TEXTS}).json()["predictions"]
    expected = massmerge.load(text_bundle(root)).predict(TEXTS)
    assert [(one["task"], one["label"]) for one in found] == [(p.task, p.label) for p in expected]


def test_the_page_the_description_and_the_key_are_those_of_the_service(service):
    client, _ = service
    assert client.get("/").status_code == 200 and "/v1/predict" in client.get("/openapi.json").json()["paths"]
    refused = httpx.post(f"{client.base_url}/v1/predict", json={"inputs": TEXTS}, timeout=60)
    assert refused.status_code == 401


def test_more_requests_under_way_bring_a_second_replica(service):
    client, process = service
    assert ask(process, "replicas") == {"RUNNING": 1}
    end = time.monotonic() + 90
    states = {}
    with ThreadPoolExecutor(6) as pool:

        def keep_asking(_):
            while time.monotonic() < end and states.get("RUNNING") != 2:
                assert client.post("/v1/predict", json={"inputs": TEXTS * 30}).status_code in (200, 503)

        asking = [pool.submit(keep_asking, i) for i in range(6)]
        while time.monotonic() < end and states.get("RUNNING") != 2:
            states = ask(process, "replicas")
            time.sleep(0.5)
        for one in asking:
            one.result()
    assert states["RUNNING"] == 2
    assert client.get("/ready").status_code == 200


def test_a_bundle_that_cannot_be_loaded_is_no_replica(root, tmp_path):
    """Ray Serve asks for health before the first request, which waits for the bundle."""
    from ray_serve import refuse_unhealthy

    async def health(bundle):
        service = Service(ServiceSettings(bundle))
        service.start()
        try:
            await refuse_unhealthy(service)
            assert service.loaded
            service._died(RuntimeError("the thread that answers has ended"))
            with pytest.raises(MassError, match="worker thread has ended"):
                await refuse_unhealthy(service)
        finally:
            await service.stop()

    asyncio.run(health(text_bundle(root)))
    shutil.copytree(text_bundle(root), tmp_path / "broken")
    (tmp_path / "broken" / "base" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(MassError, match="damaged"):
        asyncio.run(health(tmp_path / "broken"))


@pytest.fixture(autouse=True)
def _example_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "serve"))
