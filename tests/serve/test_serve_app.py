"""What clients are told, with a model that can be held up; real sockets, so that connections can break."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving import JSON, error_of, holding, wait_for


@pytest.fixture(scope="module")
def held():
    """A service with small limits; tests leave its gate open."""
    limits = {"max_body": 5000, "max_items": 4, "max_text": 100, "max_requests": 8, "queue": 6}
    with pytest.MonkeyPatch.context() as patch, holding(patch, **limits) as found:
        yield found


# Answers


def test_one_input_and_many_are_answered_in_order(held):
    one = held.predict("hello").json()
    assert one["model"] == "bundle" and len(one["request_id"]) == 32
    assert one["predictions"] == [
        {
            "task": "spam", "label": "first", "confidence": None, "score": 0.7, "error": None,
            "explain": None, "selected": ["spam"],
            "truncated": False,
            "alternatives": [{"task": "spam", "label": "ham", "score": 0.3, "value": None}],
            "labels": None, "scores": None, "value": None, "heads": {},
        }
    ]  # fmt: skip
    many = held.predict(["a", {"text": "b", "text_pair": "c"}, "bad"], top_k=1).json()["predictions"]
    assert [p["task"] for p in many] == ["spam", "spam", None]
    assert many[2]["error"] == {"code": "unreadable", "message": "cannot be read."}
    assert many[0]["alternatives"] == []


def test_a_request_of_bad_inputs_only_is_refused_with_each_reason(held):
    response = held.predict(["bad", "bad"])
    assert (response.status_code, response.json()["error"]["code"]) == (422, "unreadable")
    assert len(response.json()["predictions"]) == 2


def test_explain_tells_residuals_weights_heads_and_times(held):
    found = held.predict("hello", explain=True).json()["predictions"][0]["explain"]
    assert found["residuals"] == {"spam": -1.0, "topic": 1.0} and found["weights"]["spam"] == 0.9
    assert [(one["label"], one["score"]) for one in found["heads"]["spam"]] == [("first", 0.7), ("ham", 0.3)]
    assert set(found["timings"]) == {"waiting", "first pass", "second pass"} and found["batch_size"] == 1


def test_options_reach_the_model(held):
    held.predict(["a"], tasks=["topic", "spam"], route="batch", top_k=2)
    assert held.model.batches[-1] == (["a"], ["spam", "topic"], "batch", 2)


def test_a_session_reaches_the_model_with_one_memory_for_all_requests(held):
    held.predict(["a", "b"], session="x")
    keys, memory = held.model.sessions
    assert keys == ["x", "x"]
    held.predict("a", session="y")
    assert held.model.sessions == (["y"], memory)
    held.predict("a")
    assert held.model.sessions is None


def test_a_fault_of_the_service_is_a_500_without_a_trace(held):
    assert error_of(held.predict("poison")) == (500, "internal")


# What is wrong with a request


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", (400, "bad_json")),
        (b"{", (400, "bad_json")),
        (b"\xff\xfe{}", (400, "bad_json")),
        (b"[" * 3000, (400, "bad_json")),
        (b'{"inputs": 1' + b"0" * 4000 + b"}", (422, "invalid")),
        (b"[]", (422, "invalid")),
        (b"{}", (422, "invalid")),
        (b'{"inputs": []}', (422, "invalid")),
        (b'{"inputs": [[]]}', (422, "invalid")),
        (b'{"inputs": null}', (422, "invalid")),
        (b'{"inputs": {"text": 1}}', (422, "invalid")),
        (b'{"inputs": {"text": "a", "image": "b"}}', (422, "invalid")),
        (b'{"inputs": "a", "topk": 1}', (422, "invalid")),
        (b'{"inputs": "a", "top_k": 0}', (422, "invalid")),
        (b'{"inputs": "a", "route": "all"}', (422, "invalid")),
        (b'{"inputs": "a", "task": "nope"}', (422, "unknown_task")),
        (b'{"inputs": "a", "tasks": []}', (422, "invalid")),
        (b'{"inputs": "a", "session": ""}', (422, "invalid")),
        (b'{"inputs": "a", "session": "x", "route": "batch"}', (422, "invalid")),
        (b'{"inputs": "a", "task": "spam", "tasks": ["spam"]}', (422, "invalid")),
        (b'{"inputs": ["a", "a", "a", "a", "a"]}', (413, "too_many_inputs")),
        (b'{"inputs": "' + b"x" * 200 + b'"}', (422, "unreadable")),
        (b" " * 6000, (413, "too_large")),
    ],
)
def test_a_wrong_body_has_its_status_and_code(held, content, expected):
    assert error_of(held.client.post("/v1/predict", content=content, headers=JSON)) == expected
    if expected[1] not in ("unknown_task",):
        hugging_face = held.client.post("/", content=content, headers=JSON)
        assert hugging_face.status_code in (200, expected[0], 422)


def test_what_is_wrong_is_said_in_words_and_the_input_is_not_repeated(held):
    response = held.client.post("/v1/predict", json={"inputs": [{"text": 5}], "top_k": "many-secrets"})
    message = response.json()["error"]["message"]
    assert "inputs: give a text" in message and "top_k: " in message and "secrets" not in message


def test_other_kinds_of_body_paths_and_methods_are_refused_in_the_same_form(held):
    client = held.client
    assert error_of(client.post("/v1/predict", content=b"x", headers={"Content-Type": "text/plain"})) == (
        415, "unsupported_media_type")  # fmt: skip
    assert error_of(client.post("/v1/predict", content=b"x", headers={**JSON, "Content-Encoding": "gzip"}))[0] == 415
    assert error_of(client.get("/nothing")) == (404, "not_found")
    assert error_of(client.delete("/v1/predict")) == (405, "method_not_allowed")
    assert error_of(client.post("/v1/predict", files={"image": b"x"}, data={"top_k": "x"}))[1] == "invalid"
    assert error_of(client.post("/v1/predict", files=[("image", b"x")] * 5))[0] in (400, 413)
    broken = client.post(
        "/v1/predict", content=b"--x\r\nbroken", headers={"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert broken.status_code in (400, 422)


def test_a_body_without_a_length_is_counted_while_it_streams_in(held):
    chunks = (b" " * 1000 for _ in range(20))
    assert error_of(held.client.post("/v1/predict", content=chunks, headers=JSON)) == (413, "too_large")


def raw(held, content: bytes) -> bytes:
    """What comes back for these bytes; the connection is closed by the service."""
    with socket.create_connection(held.address, 10) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(65536):
            found += part
    return found


def test_what_is_no_http_and_headers_without_end_do_no_harm(held):
    assert raw(held, b"\x16\x03\x01 not http \r\n\r\n").startswith(b"HTTP/1.1 400")
    assert raw(held, b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 4")
    assert held.predict("hello").status_code == 200


def test_ids_are_echoed_if_they_are_harmless(held):
    assert held.client.get("/health", headers={"X-Request-ID": "abc-1"}).headers["x-request-id"] == "abc-1"
    hostile = held.client.get("/health", headers={"X-Request-ID": "a b\x7f<script>"}).headers["x-request-id"]
    assert len(hostile) == 32


def test_answers_forbid_foreign_scripts_and_other_origins(held):
    headers = held.client.get("/", headers={"Origin": "https://elsewhere.example"}).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


# Load


@pytest.fixture
def closed(held):
    """The model's gate is closed: what is sent waits until the gate is opened."""
    before = len(held.model.batches)
    held.model.gate.clear()
    yield lambda count=1: wait_for(lambda: len(held.model.batches) >= before + count)
    held.model.gate.set()
    wait_for(lambda: held.metric("mass_active_requests") == 1)  # the question itself


def test_a_full_queue_and_too_many_requests_are_refused_at_once(held, closed):
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(held.predict, "a")
        closed()
        waiting = [pool.submit(held.predict, [str(n), "more"]) for n in range(3)]
        wait_for(lambda: held.service.waiting == 6)
        full = held.predict("b")
        assert error_of(full) == (503, "full") and int(full.headers["retry-after"]) >= 1
        assert held.client.get("/health").status_code == 200
        held.model.gate.set()
        assert [f.result().status_code for f in (first, *waiting)] == [200] * 4
    assert held.metric("mass_queue_length") == 0


def test_more_requests_than_may_be_under_way_are_refused(monkeypatch):
    with holding(monkeypatch, max_requests=2) as found, ThreadPoolExecutor(2) as pool:
        found.model.gate.clear()
        under_way = [pool.submit(found.predict, "a") for _ in range(2)]
        # The two may run as one batch, or the second wait.
        wait_for(lambda: sum(len(rows) for rows, *_ in found.model.batches) + found.service.waiting >= 2)
        assert error_of(found.predict("b")) == (503, "full")
        assert found.client.get("/ready").status_code == 200  # a probe is always answered
        found.model.gate.set()
        assert [f.result().status_code for f in under_way] == [200, 200]


def test_a_client_that_goes_away_leaves_the_queue(held, closed):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(held.predict, "a")
        closed()
        with socket.create_connection(held.address, 10) as connection:
            body = json.dumps({"inputs": ["gone 1", "gone 2"]}).encode()
            head = (
                f"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            )
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            wait_for(lambda: held.service.waiting == 2)
        wait_for(lambda: held.service.waiting == 0)
        held.model.gate.set()
        assert first.result().status_code == 200
    assert not any("gone 1" in rows for rows, *_ in held.model.batches)
    assert held.metric('mass_requests_total{method="POST",path="/v1/predict",status="499"}') == 1


def test_a_request_without_an_answer_in_time_is_refused_and_forgotten(monkeypatch):
    with holding(monkeypatch, timeout=0.3) as found:
        found.model.gate.clear()
        refused = found.predict("a")
        assert error_of(refused) == (503, "timeout") and "retry-after" in refused.headers
        assert error_of(found.predict("b")) == (503, "timeout")  # it waits behind the first
        found.model.gate.set()
        wait_for(lambda: found.predict("c").status_code == 200)
        assert not any("b" in rows for rows, *_ in found.model.batches)


def test_a_body_that_does_not_arrive_in_time_is_refused(monkeypatch):
    with holding(monkeypatch, timeout=0.3) as found, socket.create_connection(found.address, 10) as connection:
        connection.sendall(
            b"POST /v1/predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")


def test_bodies_under_way_are_bounded_together(monkeypatch):
    with holding(monkeypatch, max_held=150) as found, ThreadPoolExecutor(1) as pool:
        found.model.gate.clear()
        first = pool.submit(found.predict, "x" * 100)
        wait_for(lambda: found.model.batches)
        assert error_of(found.predict("y" * 100)) == (503, "full")
        found.model.gate.set()
        assert first.result().status_code == 200
        assert found.predict("y" * 100).status_code == 200


# The description


def test_the_description_names_every_path_with_examples_and_errors(held):
    found = held.client.get("/openapi.json").json()
    assert set(found["paths"]) == {
        "/", "/v1/predict", "/v1/tasks", "/v1/bundle", "/v1/models", "/v1/traffic", "/health", "/ready", "/metrics",
        "/admin/reload", "/v1/route", "/v1/chat/completions", "/v1/completions",
    }  # fmt: skip
    for path in ("/", "/v1/predict", "/v1/route", "/v1/chat/completions", "/v1/completions"):
        post = found["paths"][path]["post"]
        assert {"400", "401", "413", "415", "503"} <= set(post["responses"])
        assert post["requestBody"]["content"]["application/json"]["examples"]
    names = set(found["components"]["schemas"])
    assert {part.partition('"')[0] for part in json.dumps(found).split("#/components/schemas/")[1:]} - {
        f"Options/properties/{name}" for name in ("task", "tasks", "top_k", "route", "session", "explain")
    } <= names
    page = held.client.get("/docs")
    assert (
        "curl" in page.text
        and "<script" not in page.text
        and "http://" not in page.text.replace("http://127.0.0.1", "")
    )
