"""The state of a service: who may call it, when it is ready, reloads, figures and logs."""

import io
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from massmerge.errors import InputError
from massmerge.serve.logs import set_up_logs
from serving import JSON, KEY, FakeModel, error_of, holding, loaded, wait_for


def test_with_a_key_everything_but_probes_page_and_description_asks_for_it(monkeypatch):
    with holding(monkeypatch, api_key=KEY.encode()) as found:
        assert found.predict("a").status_code == 200
        bearer = {"X-API-Key": "", "Authorization": f"Bearer {KEY}"}
        assert found.client.get("/v1/models", headers=bearer).status_code == 200
        assert found.client.get("/v1/bundle", headers={"X-API-Key": KEY + "x"}).headers["www-authenticate"] == "Bearer"
        found.client.headers["X-API-Key"] = "wrong"
        paths = [
            ("POST", "/v1/predict"),
            ("POST", "/"),
            ("POST", "/admin/reload"),
            ("GET", "/v1/tasks"),
            ("GET", "/metrics"),
        ]
        assert [error_of(found.client.request(*path)) for path in paths] == [(401, "unauthorized")] * len(paths)
        assert [found.client.get(p).status_code for p in ("/health", "/ready", "/docs", "/openapi.json")] == [200] * 4


def test_pages_of_other_origins_may_call_only_if_told(monkeypatch):
    origin = "https://app.example"
    with holding(monkeypatch, cors_origins=(origin,), api_key=KEY.encode()) as found:
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "X-API-Key": ""}
        allowed = found.client.options("/v1/predict", headers=asked)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, origin)
        other = found.client.post("/v1/predict", json={"inputs": "a"}, headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_alive_at_once_and_ready_when_loaded(monkeypatch):
    gate = threading.Event()

    def load(settings):
        assert gate.wait(30)
        return loaded(FakeModel())

    with holding(monkeypatch, load=load) as found:
        assert found.client.get("/health").json() == {"status": "alive"}
        assert error_of(found.client.get("/ready")) == (503, "not_ready")
        assert error_of(found.predict("a")) == (503, "not_ready")
        gate.set()
        wait_for(lambda: found.client.get("/ready").status_code == 200)
        assert found.predict("a").status_code == 200


def test_a_reload_loses_no_request_and_a_failed_one_changes_nothing(monkeypatch):
    old, new = FakeModel("old"), FakeModel("new")
    bundles = [loaded(old), loaded(new), InputError("bundle: damaged.")]

    def load(settings):
        found = bundles.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    with holding(monkeypatch, old, load=load, api_key=KEY.encode()) as found, ThreadPoolExecutor(2) as pool:
        wait_for(lambda: found.client.get("/ready").status_code == 200)
        old.gate.clear()
        under_way = pool.submit(found.predict, "a")
        wait_for(lambda: old.batches)
        waiting = pool.submit(found.predict, "b")
        wait_for(lambda: found.service.waiting == 1)
        assert found.client.post("/admin/reload").json()["tasks"] == ["spam", "topic"]
        old.gate.set()
        labels = [f.result().json()["predictions"][0]["label"] for f in (under_way, waiting)]
        assert labels == ["old", "new"]
        failed = found.client.post("/admin/reload")
        assert error_of(failed) == (409, "reload_failed") and "damaged" in failed.text
        assert found.predict("c").json()["predictions"][0]["label"] == "new"
        assert found.metric('mass_reloads_total{result="failed"}') == 1


@pytest.mark.parametrize("fault", [TypeError("x"), KeyError("tasks"), ZeroDivisionError(), RecursionError()])
def test_a_reload_that_fails_in_any_way_leaves_the_old_bundle(monkeypatch, fault):
    bundles = [loaded(FakeModel("old")), fault]

    def load(settings):
        found = bundles.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    with holding(monkeypatch, FakeModel("old"), load=load, api_key=KEY.encode()) as found:
        wait_for(lambda: found.client.get("/ready").status_code == 200)
        assert error_of(found.client.post("/admin/reload")) == (409, "reload_failed")
        assert found.predict("a").json()["predictions"][0]["label"] == "old"


def test_reloading_by_http_needs_a_key(monkeypatch):
    with holding(monkeypatch) as found:
        assert error_of(found.client.post("/admin/reload")) == (403, "forbidden")


def test_figures_and_traffic_count_what_was_answered(monkeypatch):
    with holding(monkeypatch) as found:
        found.predict(["a", "b", "bad"])
        assert found.metric('mass_routed_total{task="spam"}') == 2
        assert found.metric('mass_input_errors_total{code="unreadable"}') == 1
        assert found.metric("mass_batch_size_count") == 1
        assert found.metric('mass_requests_total{method="POST",path="/v1/predict",status="200"}') == 1
        traffic = found.client.get("/v1/traffic").json()
        assert (traffic["tasks"], traffic["errors"], traffic["abstentions"]) == ({"spam": 2}, 1, 0)
        assert traffic["recent"][-1]["tasks"] == {"spam": 2} and traffic["latency_ms"]["p50"] > 0


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_line_of_the_log_has_the_id_and_never_the_input(monkeypatch, form):
    stream = io.StringIO()
    set_up_logs(form, stream=stream)
    try:
        with holding(monkeypatch) as found:
            sent = {"X-Request-ID": "id-of-mine"}
            found.client.post("/v1/predict", json={"inputs": ["my secret", "odd", "poison"]}, headers=sent)
            found.client.post("/v1/predict?secret=1", content=b'{"secret": ', headers=JSON)
    finally:
        logging.getLogger("massmerge.serve").handlers.clear()
    lines = stream.getvalue()
    assert "secret" not in lines and "poison" not in lines and "ZeroDivisionError" in lines
    line = next(line for line in lines.splitlines() if "id-of-mine" in line and "status" in line)
    if form == "json":
        found = json.loads(line)
        assert (found["event"], found["status"], found["inputs"], found["path"]) == ("request", 200, 3, "/v1/predict")
    else:
        assert "status=200" in line and "inputs=3" in line
