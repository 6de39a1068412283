"""The command that serves, in a process of its own, with real bundles: started on a free port, stopped by its own pid."""

import base64
import io
import json
import shutil
import signal
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from huggingface_hub import InferenceClient, constants
from PIL import Image

import massmerge
from massmerge.cli.main import main
from massmerge.model.explain import explain
from models import image_bundle, text_bundle, with_options
from serving import KEY, serving, start_server, wait_for

TEXTS = ["win a free prize now", "the team scored a late goal", "vote on the law"]


@pytest.fixture(scope="module")
def text(root):
    examples = root / "examples.txt"
    examples.write_text("\n".join(TEXTS))
    with serving(text_bundle(root), "--examples", examples, "--name", "mail") as running:
        yield running


@pytest.fixture(scope="module")
def image(root):
    key = root / "key"
    key.write_text(f"{KEY}\n")
    limits = ["--max-pixels", 10_000, "--api-key-file", key, "--cors-origin", "https://app.example"]
    with serving(image_bundle(root), *limits) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture
def online(monkeypatch):
    """Lets Hugging Face's client call; it calls this machine only."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def picture(side: int = 40, form: str = "PNG") -> bytes:
    pixels = np.random.default_rng(side).integers(0, 255, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def bomb(side: int) -> bytes:
    """A PNG that says it is of that many pixels a side, and holds almost nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1_000_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


# Text


def test_served_answers_are_those_of_predict(text, root):
    expected = massmerge.load(text_bundle(root)).predict(TEXTS)
    found = text.predict(TEXTS).json()["predictions"]
    assert [(p["task"], p["label"]) for p in found] == [(p.task, p.label) for p in expected]
    assert [p["score"] for p in found] == pytest.approx([p.score for p in expected], abs=1e-4)
    assert [a["label"] for a in found[0]["alternatives"]] == [a.label for a in expected[0].alternatives]
    assert found[0]["selected"] == expected[0].routing.selected


def test_an_explanation_is_that_of_explain(text, root):
    expected = explain(massmerge.load(text_bundle(root)), TEXTS[0])
    found = text.predict(TEXTS[0], explain=True).json()["predictions"][0]["explain"]
    assert found["residuals"] == pytest.approx(expected.prediction.routing.residuals, abs=1e-3)
    assert found["weights"] == pytest.approx(expected.prediction.routing.weights, abs=1e-3)
    assert {t: [a["label"] for a in answers] for t, answers in found["heads"].items()} == {
        t: [a.label for a in answers] for t, answers in expected.heads.items()
    }
    assert {"first pass", "second pass"} <= set(found["timings"])


def test_a_known_task_is_not_routed(text):
    found = text.predict(TEXTS[0], task="spam", explain=True).json()["predictions"][0]
    assert found["task"] == "spam" and "first pass" not in found["explain"]["timings"]
    assert {p["task"] for p in text.predict(TEXTS, tasks=["spam", "mood"]).json()["predictions"]} <= {"spam", "mood"}


def test_an_empty_text_fails_alone(text):
    found = text.predict([TEXTS[0], " ", {"image": "aGVsbG8="}]).json()["predictions"]
    assert [p["error"] and p["error"]["code"] for p in found] == [None, "unreadable", "unreadable"]


def test_the_hugging_face_client_classifies_texts(text, root, online):
    found = InferenceClient(text.url).text_classification(TEXTS[0], top_k=2)
    expected = massmerge.load(text_bundle(root)).predict(TEXTS[:1], top=2)[0]
    assert [element.label for element in found] == [expected.label, expected.alternatives[0].label]
    assert found[0].score == pytest.approx(expected.score, abs=1e-4)
    lists = text.client.post("/", json={"inputs": TEXTS, "parameters": {"task": "spam"}}).json()
    assert [len(labels) for labels in lists] == [2, 2, 2] and set(lists[0][0]) == {"task", "label", "score"}
    assert "inputs[1]" in text.client.post("/", json={"inputs": ["a", ""]}).json()["error"]["message"]


def test_it_tells_what_it_serves(text):
    bundle = text.client.get("/v1/bundle").json()
    assert (bundle["name"], bundle["kind"]) == ("mail", "text")
    assert [task["name"] for task in bundle["tasks"]] == ["spam", "topic", "mood"]
    assert bundle["tasks"][2]["labels"] == ["negative", "positive"] and len(bundle["similarity"]) == 3
    assert bundle["examples"] == [{"text": line} for line in TEXTS]
    assert bundle["router"]["top_k"] == 1  # what `auto` comes to
    assert text.client.get("/v1/models").json()["data"][0]["id"] == "mail"
    assert text.client.get("/v1/tasks").json()["tasks"] == bundle["tasks"]
    assert sum(text.client.get("/v1/traffic").json()["tasks"].values()) > 0


def test_the_page_and_the_description_ask_for_nothing_elsewhere(text):
    for path in ("/", "/docs"):
        page = text.client.get(path)
        assert page.headers["content-type"].startswith("text/html")
        assert "//cdn" not in page.text and "https://" not in page.text
    assert text.client.get("/style.css").headers["content-type"].startswith("text/css")
    assert text.client.get("/../settings.py").status_code == 404


def test_the_log_is_json_and_holds_no_input(text):
    text.client.post("/v1/predict", json={"inputs": "a most secret text"}, headers={"X-Request-ID": "the-id"})
    wait_for(lambda: "the-id" in text.output.read_text())
    log = text.output.read_text()
    assert "secret" not in log and TEXTS[0] not in log
    lines = [json.loads(line) for line in log.splitlines()]
    assert next(line for line in lines if line.get("request_id") == "the-id")["status"] == 200


# Images


def test_an_image_may_come_as_base64_data_url_upload_or_as_it_is(image, root, tmp_path):
    data = picture()
    (tmp_path / "a.png").write_bytes(data)
    expected = massmerge.load(image_bundle(root)).predict(tmp_path / "a.png")[0]
    plain = base64.b64encode(data).decode()
    answers = [
        image.predict(plain),
        image.predict({"image": plain}),
        image.predict([{"image": f"data:image/png;base64,{plain}"}]),
        image.client.post("/v1/predict", files={"image": ("a.png", data)}, data={"top_k": "2", "explain": "true"}),
        image.client.post("/v1/predict", content=data, headers={"Content-Type": "image/png"}),
    ]
    found = [answer.json()["predictions"][0] for answer in answers]
    assert {(p["task"], p["label"]) for p in found} == {(expected.task, expected.label)}
    assert found[3]["explain"]["weights"].keys() == {"a", "b"}
    several = image.client.post("/v1/predict", files=[("x", data), ("y", picture(30, "JPEG")), ("z", b"no image")])
    assert [p["error"] is None for p in several.json()["predictions"]] == [True, True, False]


def test_the_hugging_face_client_classifies_images(image, root, online):
    client = InferenceClient(image.url, token=KEY)
    expected = massmerge.load(image_bundle(root)).predict(Image.open(io.BytesIO(picture())))[0]
    assert client.image_classification(picture())[0].label == expected.label
    assert len(client.image_classification(picture(), top_k=1)) == 1


def test_pixels_are_counted_before_they_are_decoded(image):
    large, vast = (
        image.predict({"image": base64.b64encode(bomb(101)).decode()}),
        image.predict([{"image": base64.b64encode(bomb(side)).decode()} for side in (60_000, 101)]),
    )
    for answer in (large, vast):
        assert answer.status_code == 422
        assert all("pixels" in p["error"]["message"] for p in answer.json()["predictions"])
    truncated = image.predict([{"image": base64.b64encode(picture()[:200]).decode()}, {"text": "a text"}, "no base64!"])
    assert [p["error"]["code"] for p in truncated.json()["predictions"]] == ["unreadable"] * 3


def test_a_wrong_key_and_a_foreign_origin_are_refused_by_the_command_too(image):
    assert image.client.get("/v1/tasks", headers={"Authorization": "Bearer wrong"}).status_code == 401
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    assert image.client.options("/v1/predict", headers=asked).status_code == 200
    assert "mass_ready 1.0" in image.client.get("/metrics").text


# Life


def test_a_hangup_loads_the_bundle_again_and_a_stop_finishes_what_is_under_way(root, tmp_path):
    bundle = tmp_path / "bundle"
    shutil.copytree(text_bundle(root), bundle)
    with serving(bundle, "--batch-wait", 400) as running:
        assert running.client.get("/v1/bundle").json()["router"]["threshold"] == 0.2
        with_options(text_bundle(root), tmp_path / "other", router={"threshold": 0.9})
        bundle.rename(tmp_path / "old")
        (tmp_path / "other").rename(bundle)
        running.signal(signal.SIGHUP)
        wait_for(lambda: running.client.get("/v1/bundle").json()["router"]["threshold"] == 0.9)
        (bundle / "mass.json").write_text("damaged")
        running.signal(signal.SIGHUP)
        wait_for(lambda: "reload failed" in running.output.read_text())
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{running.url}/v1/predict", json={"inputs": TEXTS}, timeout=30)
            wait_for(lambda: "mass_queue_length 3.0" in running.client.get("/metrics").text)
            assert running.stop() == 0  # while the request waits for others to join its batch
            assert asked.result().status_code == 200 and len(asked.result().json()["predictions"]) == 3


def test_what_cannot_be_served_is_told_with_exit_code_2(root, tmp_path):
    bundle = text_bundle(root)
    for words, arguments in {
        "not a bundle": [tmp_path],
        "16 or more": [bundle, "--api-key-file", __file__],
        "--max-items is more than --queue": [bundle, "--queue", 5],
        "nan is not a valid number of seconds": [bundle, "--timeout", "nan"],
        "inf is not a valid number of seconds": [bundle, "--timeout", "inf"],
        "nan is not a valid number": [bundle, "--batch-wait", "nan"],
    }.items():
        result = CliRunner().invoke(main, ["serve", *map(str, arguments)])
        assert (result.exit_code, words in result.stderr) == (2, True), result.stderr
    started = {
        "cannot listen there": start_server(bundle, "--host", "192.0.2.1", wait=False),
        "no router": start_server(bundle, "--router", "none", wait=False),
    }
    for words, running in started.items():
        running.process.join(60)
        said = running.output.read_text()
        assert (running.process.exitcode, words in said) == (2, True), said
