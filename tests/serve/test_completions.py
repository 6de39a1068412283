"""A bundle that writes, asked in OpenAI's protocol: by OpenAI's own client, by curl, and by clients that leave."""

import json
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

import massmerge
from massmerge.model.decode import StepDecoder
from serving import holding, wait_for
from writers import chat_bundle

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "a b"}, {"role": "user", "content": "free prize c"}]


@pytest.fixture(scope="module")
def bundle(root):
    return chat_bundle(root)


@pytest.fixture(scope="module")
def model(bundle):
    return massmerge.load(bundle)


@pytest.fixture(scope="module")
def held(bundle):
    with pytest.MonkeyPatch.context() as patch, holding(patch, bundle=bundle, max_new_tokens=400) as found:
        yield found


@pytest.fixture(scope="module")
def client(held):
    with openai.OpenAI(base_url=f"{held.client.base_url}/v1", api_key="none", max_retries=0) as found:
        yield found


def asked(**options) -> dict:
    return {"model": "writers", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **options}


def test_openais_client_gets_the_text_that_generate_writes(client, model):
    expected = model.generate([MESSAGES], max_new_tokens=8)[0]
    answer = client.chat.completions.with_raw_response.create(**asked())
    found = answer.parse()
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].finish_reason == ("length" if len(expected.tokens) == 8 else "stop")
    assert found.usage.completion_tokens == len(expected.tokens)
    assert found.usage.prompt_tokens == len(model.read(MESSAGES)["input_ids"])
    assert found.mass == {"task": expected.task, "confidence": pytest.approx(expected.confidence, abs=1e-3)}
    assert answer.headers["x-mass-task"] == expected.task
    assert float(answer.headers["x-mass-confidence"]) == pytest.approx(expected.confidence, abs=1e-3)


def test_a_stream_brings_the_same_text_and_what_it_used(client):
    whole = client.chat.completions.create(**asked(logprobs=True, top_logprobs=2))
    chunks = list(client.chat.completions.create(
        **asked(logprobs=True, top_logprobs=2), stream=True, stream_options={"include_usage": True}))  # fmt: skip
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert parts[0].delta.role == "assistant"
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage and chunks[0].mass == whole.mass
    told = [one.logprob for part in parts if part.logprobs for one in part.logprobs.content]
    assert told == pytest.approx([one.logprob for one in whole.choices[0].logprobs.content], abs=1e-4)
    assert all(len(one.top_logprobs) == 2 for one in whole.choices[0].logprobs.content)


def test_a_model_that_is_a_tasks_name_gives_the_task(client, model):
    assert [one.id for one in client.models.list()] == ["writers", "a", "b", "c"]
    for task in "bc":
        found = client.completions.create(model=task, prompt="free prize", max_tokens=6, temperature=0)
        assert found.choices[0].text == model.generate("free prize", task=task, max_new_tokens=6)[0].text
        assert found.mass == {"task": task, "confidence": None}


def test_a_seed_repeats_a_text_and_a_stop_string_ends_it(client):
    drawn = asked(temperature=1.5, max_tokens=12)
    first, second, other = (
        client.chat.completions.create(**drawn, seed=seed).choices[0].message.content for seed in (1, 1, 2)
    )
    assert first == second != other
    letter = next(letter for letter in first[2:] if letter.isalnum())
    ended = client.chat.completions.create(**drawn, seed=1, stop=letter).choices[0]
    assert ended.message.content == first[: first.index(letter)] and ended.finish_reason == "stop"


def test_prompts_of_a_session_are_routed_together_and_nothing_of_them_is_kept(held, client, model):
    texts, memory = ["free prize, call", "sad film"], massmerge.Sessions()
    alone = model.route(texts)
    together = [model.route([text], session="x", memory=memory)[0] for text in texts]
    assert together[1].confidence != pytest.approx(alone[1].confidence, abs=1e-3)

    def confidence(text, **more):
        found = client.completions.create(model="writers", prompt=text, max_tokens=1, **more)
        return pytest.approx(found.mass["confidence"], abs=1e-4)

    assert [confidence(text, extra_body={"session": "talk-7"}) for text in texts] == [r.confidence for r in together]
    assert confidence(texts[1], extra_body={"session": "another"}) == alone[1].confidence
    assert confidence(texts[1]) == alone[1].confidence
    told = client.chat.completions.create(**asked(max_tokens=1), extra_body={"session": "talk-8"})
    assert told.mass["task"] and held.metric("mass_sessions") == 3
    kept = [table for table in held.service._sessions._tables.values() for table in table.values()]
    assert all(set(vars(one)) == {"total", "weight", "used"} for one in kept)  # sums of scores, and nothing else


def test_curl_reads_events(held):
    body = json.dumps(asked(stream=True))
    command = ["curl", "-sN", f"{held.client.base_url}{CHAT}", "-H", "Content-Type: application/json", "-d", body]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and json.loads(lines[0][6:])["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"n": 2}, 400, "n"),
        ({"model": "gpt"}, 404, "model"),
        ({"max_tokens": 401}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"tools": []}, 400, "tools"),
        ({"stop": [""]}, 400, "stop"),
        ({"session": ""}, 400, "session"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "a " * 200}]}, 400, None),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, 400, None),
    ],
)
def test_what_cannot_be_done_is_an_error_in_openais_shape(held, changes, status, param):
    found = held.client.post(CHAT, json=asked(**changes))
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error"), error
    assert error["message"] and set(error) == {"message", "type", "param", "code"}


def test_labels_are_not_given_by_a_bundle_that_writes_and_tasks_are(held):
    refused = held.predict("a")
    assert refused.status_code == 404 and "/v1/chat/completions" in refused.json()["error"]["message"]
    found = held.client.post("/v1/route", json={"messages": MESSAGES}).json()["routes"][0]
    assert found["task"] == held.client.post(CHAT, json=asked()).json()["mass"]["task"]
    assert held.client.get("/v1/bundle").json()["answers"] == "text"


def test_many_at_once_get_what_each_would_get_alone(held, model):
    texts = ["free prize", "team vote", "sad film a", "a b c d e"] * 3
    expected = {text: model.generate(text, max_new_tokens=10)[0].text for text in set(texts)}
    bodies = [{"prompt": text, "max_tokens": 10, "temperature": 0} for text in texts]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda body: held.client.post("/v1/completions", json=body).json(), bodies))
    assert [one["choices"][0]["text"] for one in found] == [expected[text] for text in texts]


def test_a_client_that_leaves_frees_its_place(held, monkeypatch):
    step = StepDecoder.step  # a quick machine would be done before anybody leaves
    monkeypatch.setattr(StepDecoder, "step", lambda self: time.sleep(0.005) or step(self))
    long = asked(max_tokens=400, stream=True, logprobs=True)
    with held.client.stream("POST", CHAT, json=long) as answer:
        next(answer.iter_lines())
    wait_for(lambda: not held.service.writer._running)
    with httpx.Client(base_url=held.client.base_url, timeout=0.05) as hasty, pytest.raises(httpx.ReadTimeout):
        hasty.post(CHAT, json={**long, "stream": False})
    wait_for(lambda: not held.service.writer._running and held.metric("mass_active_requests") == 1)


def test_a_text_that_takes_too_long_is_refused_or_broken_off_with_a_reason(monkeypatch, bundle):
    gate, step = threading.Event(), StepDecoder.step
    gate.set()
    monkeypatch.setattr(StepDecoder, "step", lambda self: gate.wait(20) and step(self))
    with holding(monkeypatch, bundle=bundle, timeout=0.4) as slow:
        gate.clear()
        with slow.client.stream("POST", CHAT, json=asked(stream=True)) as answer:
            assert answer.status_code == 200 and '"timeout"' in list(answer.iter_lines())[-2]
        late = slow.client.post(CHAT, json=asked())
        assert (late.status_code, late.json()["error"]["code"]) == (503, "timeout")
        assert int(late.headers["retry-after"]) >= 1
        gate.set()
        wait_for(lambda: not slow.service.writer._running)
