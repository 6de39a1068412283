"""An encoder-decoder that is served: one text after the other, each by transformers' own `generate`."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import massmerge
from models import write_recipe
from serving import holding
from writers import letter_tokenizer, make_writers

TEXTS = ["sad film a b", "free prize now", "the team", "vote on the law"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    make_writers(folder, "t5", "abc")
    letter_tokenizer().save_pretrained(folder / "base")
    massmerge.merge(write_recipe(folder, list("abc"), rank=8), folder / "writers")
    return folder / "writers"


@pytest.fixture(scope="module")
def model(bundle):
    return massmerge.load(bundle)


@pytest.fixture(scope="module")
def held(bundle):
    with pytest.MonkeyPatch.context() as patch, holding(patch, bundle=bundle, max_new_tokens=30) as found:
        yield found


@pytest.fixture(scope="module")
def complete(held):
    with openai.OpenAI(base_url=f"{held.client.base_url}/v1", api_key="none", max_retries=0) as client:
        yield lambda prompt, **more: client.completions.create(
            **{"model": "writers", "prompt": prompt, "max_tokens": 6, "temperature": 0, **more}
        )


def test_clients_that_ask_at_the_same_time_get_the_texts_that_generate_writes(complete, model):
    expected = {text: model.generate(text, max_new_tokens=6)[0] for text in TEXTS}
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        found = dict(zip(TEXTS, pool.map(complete, TEXTS), strict=True))
    for text, answer in found.items():
        assert answer.choices[0].text == expected[text].text
        assert answer.mass["task"] == expected[text].task
        assert answer.usage.completion_tokens == len(expected[text].tokens)
        ended = expected[text].tokens[-1] == 2
        assert answer.choices[0].finish_reason == ("stop" if ended else "length")
    assert len({answer.mass["task"] for answer in found.values()}) > 1


def test_a_task_can_be_named_and_a_prompt_be_tokens(complete, model):
    for task in "ab":
        found = complete(TEXTS[0], model=task)
        assert found.choices[0].text == model.generate(TEXTS[0], task=task, max_new_tokens=6)[0].text
        assert found.mass == {"task": task, "confidence": None}
    tokens = model.read(TEXTS[0])["input_ids"].tolist()
    assert complete(tokens).choices[0].text == complete(TEXTS[0]).choices[0].text


def test_a_stream_brings_the_text_in_one_piece_and_what_it_used(complete):
    whole = complete(TEXTS[0])
    *chunks, last = complete(TEXTS[0], stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage


def test_a_seed_repeats_a_text_and_a_stop_string_ends_it(complete):
    drawn = {"temperature": 1.5, "max_tokens": 12, "model": "b"}
    first, second, other = (complete(TEXTS[0], **drawn, seed=seed).choices[0].text for seed in (1, 1, 2))
    assert first == second != other
    letter = next(letter for letter in first[2:] if letter.isalnum())
    ended = complete(TEXTS[0], **drawn, seed=1, stop=letter).choices[0]
    assert ended.text == first[: first.index(letter)] and ended.finish_reason == "stop"


def test_what_it_cannot_do_is_an_error_that_says_so(held):
    def said(path, **body):
        found = held.client.post(path, json=body)
        assert found.status_code == 400, found.text
        return found.json()["error"]["message"]

    assert "decoders only" in said("/v1/completions", prompt="a", logprobs=1, max_tokens=2)
    assert "no chat template" in said("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    assert "more tokens than the base takes" in said("/v1/completions", prompt="free " * 30, max_tokens=2)
