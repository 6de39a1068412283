"""A service that only routes: `/v1/route`, and requests that go on to a server of OpenAI's protocol."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from click.testing import CliRunner

import massmerge
from massmerge.cli.main import main
from models import text_bundle
from serving import KEY, holding, wait_for
from upstream import WORDS, upstream

CHAT = "/v1/chat/completions"


def chat(text: str, **options) -> dict:
    return {"messages": [{"role": "user", "content": text}], **options}


@pytest.fixture(scope="module")
def behind():
    with upstream() as found:
        yield found


@pytest.fixture(scope="module")
def proxy(behind):
    """A service in front of the stand-in; tests leave gates open."""
    options = {"route_only": True, "upstream": behind.url, "max_body": 5000, "max_text": 1000}
    with pytest.MonkeyPatch.context() as patch, holding(patch, **options) as found:
        yield found


def error_of(response) -> tuple[int, str]:
    found = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(found)
    return response.status_code, found["code"]


# Routes


def test_it_names_tasks_as_route_does_and_answers_nothing(monkeypatch, root):
    texts = ["win a free prize now", "the team scored a late goal", ""]
    expected = massmerge.load(text_bundle(root)).route(texts[:2])
    with holding(monkeypatch, bundle=text_bundle(root), route_only=True) as running:
        found = running.client.post("/v1/route", json={"inputs": texts, "top_k": 2}).json()["routes"]
        assert [r["task"] for r in found[:2]] == [r.selected[0] for r in expected]
        assert found[0]["confidence"] == pytest.approx(expected[0].confidence, abs=1e-4)
        assert len(found[0]["alternatives"]) == 1 and found[2]["error"]["code"] == "unreadable"
        one = running.client.post("/v1/route", json=chat(texts[0])).json()["routes"]
        assert one[0]["task"] == found[0]["task"]
        refused = running.predict("a")
        assert refused.status_code == 404 and "/v1/route" in refused.json()["error"]["message"]
        assert error_of(running.client.post(CHAT, json=chat("a"))) == (404, "not_served")
        assert running.client.get("/v1/bundle").json()["answers"] == "tasks"
        assert sum(running.client.get("/v1/traffic").json()["tasks"].values()) == 3


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (422, "invalid")),
        ({"inputs": "a", "messages": []}, (422, "invalid")),
        ({"inputs": "a", "task": "spam"}, (422, "invalid")),
        ({"inputs": "a", "tasks": ["nope"]}, (422, "unknown_task")),
        ({"messages": [{"role": "user"}]}, (422, "unreadable")),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, (422, "unreadable")),
    ],
)
def test_a_wrong_request_for_a_route_has_its_status_and_code(proxy, body, expected):
    found = proxy.client.post("/v1/route", json=body)
    assert (found.status_code, found.json()["error"]["code"]) == expected


# Requests that go on


def test_the_model_becomes_the_task_and_the_answer_comes_back_as_it_is(proxy, behind):
    client = openai.OpenAI(base_url=f"{proxy.client.base_url}/v1", api_key="of the client", max_retries=0)
    told = client.chat.completions.with_raw_response.create(
        model="bundle", messages=[{"role": "user", "content": "topic of this"}], temperature=0.5
    )
    assert (told.headers["x-mass-task"], told.headers["x-mass-confidence"]) == ("topic", "0.9000")
    assert told.parse().choices[0].message.content == "".join(WORDS)
    body, headers = behind.asked[-1]
    assert (body["model"], body["temperature"]) == ("topic", 0.5)
    assert headers["authorization"] == "Bearer of the client"  # this service has no key of its own
    text = client.completions.create(model="bundle", prompt="spam or not")
    assert text.model == "spam" and behind.asked[-1][0]["prompt"] == "spam or not"


def test_a_session_counts_in_the_choice_and_does_not_go_on(proxy, behind):
    answer = proxy.client.post(CHAT, json=chat("topic", session="talk-7"))
    assert answer.status_code == 200 and "session" not in behind.asked[-1][0]
    assert proxy.model.sessions[0] == ["talk-7"] and proxy.model.sessions[1] is proxy.service._sessions
    named = proxy.client.post(CHAT, json=chat("topic", model="spam", session="talk-7"))
    assert named.status_code == 200 and "session" not in behind.asked[-1][0]
    assert error_of(proxy.client.post(CHAT, json=chat("topic", session=7))) == (400, "invalid")


def test_a_stream_passes_through_while_it_is_written(proxy, behind):
    behind.gate.clear()
    with proxy.client.stream("POST", CHAT, json=chat("topic", model="bundle", stream=True)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        first = [
            next(lines) for _ in range(6)
        ]  # three words and the blank lines behind them, before the last is written
        behind.gate.set()
        rest = list(lines)
    said = [json.loads(line[6:]) for line in first + rest if line.startswith("data: {")]
    assert [one["choices"][0]["delta"]["content"] for one in said] == WORDS and "data: [DONE]" in rest


def test_a_task_that_the_client_names_and_models_of_others_are_left_alone(proxy, behind):
    proxy.model.batches.clear()
    given = proxy.client.post(CHAT, json=chat("topic", model="spam"))
    assert behind.asked[-1][0]["model"] == "spam" and given.headers["x-mass-task"] == "spam"
    assert "x-mass-task" not in proxy.client.post(CHAT, json=chat("topic", model="a base")).headers
    assert behind.asked[-1][0]["model"] == "a base" and not proxy.model.batches


def test_errors_of_the_upstream_come_back_in_openais_shape(proxy):
    missing, broken = (proxy.client.post(CHAT, json=chat("a", model=name)) for name in ("missing", "broken"))
    assert error_of(missing) == (404, 404) and missing.json()["error"]["message"] == "no such model"
    assert error_of(broken) == (500, "upstream_error") and "secrets" not in broken.text


@pytest.mark.parametrize(
    ("path", "content", "expected"),
    [
        (CHAT, b"{", (400, "bad_json")),
        (CHAT, b"[]", (400, "invalid")),
        (CHAT, b'{"messages": [{"role": "user", "content": "topic"}], "temperature": NaN}', (400, "bad_json")),
        (CHAT, b'{"messages": [{"role": "user", "content": "topic"}], "temperature": 1e999}', (400, "bad_json")),
        (CHAT, b'{"messages": [{"role": "user", "content": "topic"}], "a": [{"b": -1e999}]}', (400, "bad_json")),
        (CHAT, b'{"messages": 1}', (400, "invalid")),
        (CHAT, b'{"messages": []}', (400, "unreadable")),
        (CHAT, b'{"messages": [{"role": "user", "content": "none"}]}', (400, "no_task")),
        (CHAT, b'{"model": 5}', (400, "invalid")),
        ("/v1/completions", b'{"prompt": ["a", "b"]}', (400, "invalid")),
        ("/v1/completions", b'{"prompt": "poison"}', (500, "internal")),
        (CHAT, b" " * 6000, (413, "too_large")),
    ],
)
def test_a_wrong_request_is_refused_before_it_goes_on(proxy, behind, path, content, expected):
    before = len(behind.asked)
    answer = proxy.client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert error_of(answer) == expected and len(behind.asked) == before


def test_a_client_that_leaves_ends_the_upstreams_work(proxy, behind):
    for stream in (True, False):
        behind.gate.clear()
        behind.left.clear()
        behind.asked.clear()
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=proxy.client.base_url, timeout=0.3) as hasty:
            asked = pool.submit(hasty.post, CHAT, json=chat("topic", stream=stream))
            wait_for(lambda: behind.asked)
            with pytest.raises(httpx.ReadTimeout):
                asked.result()
        assert behind.left.wait(10)
        behind.gate.set()
    wait_for(lambda: proxy.metric("mass_active_requests") == 1)


def test_an_upstream_that_is_slow_or_gone_is_told_apart(monkeypatch, behind):
    behind.gate.clear()
    with holding(monkeypatch, route_only=True, upstream=behind.url, timeout=0.5) as held:
        wait_for(lambda: held.predict("a").status_code == 404)
        assert error_of(held.client.post(CHAT, json=chat("topic"))) in ((504, "upstream_timeout"), (503, "timeout"))
        with held.client.stream("POST", CHAT, json=chat("topic", stream=True)) as answer:
            assert '"upstream_timeout"' in list(answer.iter_lines())[-2]
    behind.gate.set()
    with holding(monkeypatch, route_only=True, upstream="http://127.0.0.1:9") as held:
        assert error_of(held.client.post(CHAT, json=chat("topic"))) == (502, "upstream_unreachable")


def test_the_key_of_this_service_stays_here_and_that_of_the_upstream_goes_on(monkeypatch, behind):
    options = {"route_only": True, "upstream": behind.url, "api_key": KEY.encode(), "fallback_model": "a base"}
    with holding(monkeypatch, **options, upstream_key=b"theirs") as held:
        assert held.client.post(CHAT, json=chat("none of these")).status_code == 200
        body, headers = behind.asked[-1]
        assert (body["model"], headers["authorization"]) == ("a base", "Bearer theirs")
        assert error_of(httpx.post(f"{held.client.base_url}{CHAT}", json=chat("a"))) == (401, "unauthorized")
    with holding(monkeypatch, **options) as held:
        held.client.post(CHAT, json=chat("topic"), headers={"Authorization": f"Bearer {KEY}"})
        assert "authorization" not in behind.asked[-1][1]


def test_a_key_of_bytes_that_are_no_ascii_goes_on_as_it_came(proxy, behind):
    key = "Bearer caf\u00e9".encode("latin-1")
    assert proxy.client.post(CHAT, json=chat("topic"), headers={"Authorization": key}).status_code == 200
    assert behind.asked[-1][1]["authorization"].encode("latin-1") == key


def test_wrong_options_are_told_with_exit_code_2(root):
    for words, arguments in {
        "give an address": ["--upstream", "localhost:1"],
        "with --upstream only": ["--fallback-model", "base"],
    }.items():
        result = CliRunner().invoke(main, ["serve", str(text_bundle(root)), *arguments])
        assert (result.exit_code, words in result.stderr) == (2, True), result.stderr
