"""An encoder-decoder that is served: one text after the other, each by transformers' own `generate`."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import transformers as tf

import massmerge
from models import write_recipe
from serving import holding
from writers import letter_tokenizer, make_writers, shifted

_SMALL = {
    "vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": None,
}  # fmt: skip
OTHERS = {
    "marian": (tf.MarianConfig, tf.MarianMTModel),  # translation models, whose positions are computed and not stored
    "bart": (tf.BartConfig, tf.BartForConditionalGeneration),
}
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


@pytest.mark.parametrize("kind", OTHERS)
def test_other_encoder_decoders_write_what_their_experts_write(tmp_path, monkeypatch, kind):
    config, family = OTHERS[kind]
    base = shifted(family(config(**_SMALL)).eval(), 1, 0.3)
    base.save_pretrained(tmp_path / "base")
    letter_tokenizer().save_pretrained(tmp_path / "base")
    for seed, task in enumerate("ab"):
        expert = family(base.config)
        expert.load_state_dict(base.state_dict())
        shifted(expert, 10 + seed, 0.1).save_pretrained(tmp_path / task)
    massmerge.merge(write_recipe(tmp_path, list("ab"), rank=32), tmp_path / "writers")
    with holding(monkeypatch, bundle=tmp_path / "writers") as held:
        for task in "ab":
            expert = family.from_pretrained(tmp_path / task).eval()
            ids = held.service.loaded.model.read(TEXTS[0])["input_ids"][None]
            expected = expert.generate(ids, max_new_tokens=6, do_sample=False, num_beams=1)[0, 1:]
            body = {"prompt": TEXTS[0], "model": task, "max_tokens": 6, "temperature": 0}
            found = held.client.post("/v1/completions", json=body).json()["choices"][0]
            assert found["text"] == held.service.loaded.model.tokenizer.decode(expected, skip_special_tokens=True)
        routed = held.client.post("/v1/completions", json={"prompt": TEXTS[0], "max_tokens": 2})
        assert routed.json()["mass"]["task"] in ("a", "b")


def test_clients_that_ask_at_the_same_time_get_the_texts_that_generate_writes(complete, model):
    expected = {text: model.generate(text, max_new_tokens=6)[0] for text in TEXTS}
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        found = dict(zip(TEXTS, pool.map(complete, TEXTS), strict=True))
    for text, answer in found.items():
        assert answer.choices[0].text == expected[text].text
        assert answer.mass["task"] == expected[text].task
        assert answer.usage.completion_tokens == len(expected[text].tokens)
        ended = expected[text].tokens[-1] in (1, 2)  # the end of the configuration, and that of the tokenizer
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
