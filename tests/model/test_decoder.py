"""The decoder: a mixed batch written as one, token by token, against transformers alone with one row at a time."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import transformers as tf

import massmerge
from massmerge import InputError
from massmerge.model.answers import Routing
from massmerge.model.decode import StepDecoder
from massmerge.model.decode.pieces import GrowingText
from massmerge.model.speed import lengths
from massmerge.model.stop_strings import StopStrings
from writers import NEW, dense_tokens, dense_writer, letter_tokenizer, prompts, writer_bundle

KINDS = ["gpt2", "llama untied"]
SETS = [["b"], ["a"], ["b"], ["a", "c"], ["c"]]


@pytest.fixture(scope="module")
def model(root):
    """The loaded bundle of a kind, loaded once."""
    loaded = {}

    def load(kind: str):
        if kind not in loaded:
            loaded[kind] = massmerge.load(writer_bundle(root, kind))
        return loaded[kind]

    return load


def given(*tasks) -> Routing:
    return Routing({}, dict.fromkeys(tasks, 1.0), list(tasks), "given")


def written(decoder) -> dict[int, list[int]]:
    """All tokens of all prompts that a decoder runs."""
    found: dict[int, list[int]] = {}
    while decoder.running:
        for piece in decoder.step():
            found.setdefault(piece.id, []).append(piece.token)
    return found


@pytest.fixture(scope="module")
def alone(root):
    """What a dense checkpoint of each set writes for each prompt by itself."""
    made = {}

    def tokens(kind: str):
        if kind not in made:
            dense = {tuple(s): dense_writer(writer_bundle(root, kind), kind, s) for s in SETS}
            made[kind] = [dense_tokens(dense[tuple(s)], row) for s, row in zip(SETS, prompts(kind), strict=True)]
        return made[kind]

    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_writes_what_each_prompt_alone_gets_from_a_dense_checkpoint(model, alone, kind):
    decoder = model(kind).decoder()
    ready = [decoder.prompt(row, given(*s), max_new_tokens=NEW) for s, row in zip(SETS, prompts(kind), strict=True)]
    found = written_in_order(decoder, decoder.admit(ready))
    assert found == alone(kind)


@pytest.mark.parametrize("kind", ["gpt2", "llama untied"])
def test_prompts_are_read_in_groups_of_similar_length_and_get_the_same_texts(model, alone, kind, monkeypatch):
    monkeypatch.setattr(lengths, "_TOKENS", 8)
    read, real = [], StepDecoder._read
    monkeypatch.setattr(StepDecoder, "_read", lambda self, rows: read.append(rows) or real(self, rows))
    decoder = model(kind).decoder()
    ready = [decoder.prompt(row, given(*s), max_new_tokens=NEW) for s, row in zip(SETS, prompts(kind), strict=True)]
    assert written_in_order(decoder, decoder.admit(ready)) == alone(kind)
    assert [sorted(row.prompt.ids.shape[1] for row in rows) for rows in read] == [[6, 7], [3, 4, 5]]


def written_in_order(decoder, ids) -> list[list[int]]:
    found = written(decoder)
    return [found[i] for i in ids]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_join_while_others_run_get_the_same_texts(model, alone, kind):
    decoder = model(kind).decoder()
    found: dict[int, list[int]] = {}
    ids = []
    for s, row in zip(SETS, prompts(kind), strict=True):  # one joins at each step
        ids += decoder.admit([decoder.prompt(row, given(*s), max_new_tokens=NEW)])
        for piece in decoder.step():
            found.setdefault(piece.id, []).append(piece.token)
    rest = written(decoder)
    assert [found.get(i, []) + rest.get(i, []) for i in ids] == alone(kind)


def test_a_prompt_that_is_taken_out_changes_nothing_for_the_others(model, alone):
    decoder = model("gpt2").decoder()
    ready = [decoder.prompt(r, given(*s), max_new_tokens=NEW) for s, r in zip(SETS, prompts("gpt2"), strict=True)]
    ids = decoder.admit(ready)
    first = {piece.id: [piece.token] for piece in decoder.step()}
    decoder.finish(ids[4])  # the longest
    decoder.finish(ids[1])
    waiting = decoder.admit([ready[0]])[0]
    decoder.finish(waiting)  # before it was read
    rest = written(decoder)
    kept = [ids[0], ids[2], ids[3]]
    assert [first[i] + rest.get(i, []) for i in kept] == [alone("gpt2")[i] for i in (0, 2, 3)]
    assert sorted(rest) == [i for i in kept if len(alone("gpt2")[i]) > 1]


def test_sampling_follows_each_prompts_own_seed_as_transformers_does(model, root):
    kind = "llama untied"
    options = {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.9}
    decoder = model(kind).decoder()
    rows = prompts(kind, 3)
    ready = [
        decoder.prompt(row, given(task), seed=seed, max_new_tokens=NEW, **options)
        for seed, (task, row) in enumerate(zip("abc", rows, strict=True), 5)
    ]
    found = written_in_order(decoder, decoder.admit(ready))
    expected = []
    for seed, (task, row) in enumerate(zip("abc", rows, strict=True), 5):
        dense = dense_writer(writer_bundle(root, kind), kind, [task])
        torch.manual_seed(seed)
        expected.append(dense_tokens(dense, row, **options))
    assert found == expected


def test_each_prompt_has_options_of_its_own(model, root):
    decoder = model("gpt2").decoder()
    row = prompts("gpt2", 1)[0]
    dense = dense_writer(writer_bundle(root, "gpt2"), "gpt2", ["a"])
    greedy = dense_tokens(dense, row)
    options = [{"max_new_tokens": 2}, {"max_new_tokens": NEW, "bad_words_ids": [[greedy[0]]]}, {"max_new_tokens": NEW}]
    ids = decoder.admit([decoder.prompt(row, given("a"), **o) for o in options])
    found = written_in_order(decoder, ids)
    assert found == [greedy[:2], dense_tokens(dense, row, bad_words_ids=[[greedy[0]]]), greedy]
    assert found[1][0] != greedy[0]


def test_pieces_say_why_a_text_ends(model):
    decoder = model("gpt2").decoder()
    row = prompts("gpt2", 1)[0]
    first = model("gpt2").generate([row], task="a", max_new_tokens=1)[0].tokens[0]
    decoder.admit([decoder.prompt(row, given("a"), max_new_tokens=1)])
    decoder.admit([decoder.prompt(row, given("a"), max_new_tokens=3, eos_token_id=first)])
    assert [piece.end for piece in decoder.step()] == ["length", "stop"]
    assert decoder.running == [] and decoder.step() == []


def test_log_probabilities_are_those_of_the_plain_scores(model, root):
    decoder = model("gpt2").decoder()
    row = prompts("gpt2", 1)[0]
    decoder.admit(
        [decoder.prompt(row, given("a"), logprobs=3, do_sample=True, temperature=5.0, seed=1, max_new_tokens=1)]
    )
    piece = decoder.step()[0]
    dense = dense_writer(writer_bundle(root, "gpt2"), "gpt2", ["a"])
    with torch.inference_mode():
        expected = dense(row["input_ids"][None]).logits[0, -1].log_softmax(-1)
    assert piece.logprob == pytest.approx(float(expected[piece.token]), abs=1e-4)
    assert list(piece.top) == expected.topk(3).indices.tolist()
    assert list(piece.top.values()) == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)


def test_a_row_without_numbers_ends_with_an_error_and_the_others_go_on(model, root):
    decoder = model("gpt2").decoder()

    def spoil(ids, scores):
        raise AssertionError("processors are not asked for scores that are no numbers")

    rows = prompts("gpt2", 2)
    ready = [decoder.prompt(row, given("a"), max_new_tokens=2) for row in rows]
    bad = decoder.prompt(rows[0], given("b"), logits_processor=tf.LogitsProcessorList([spoil]), max_new_tokens=2)
    change = bad.changes.change("wte.weight")
    assert change.update is not None
    bad.changes._made["wte.weight"] = change._replace(
        update=change.update._replace(core=change.update.core * torch.nan)
    )
    try:
        ids = decoder.admit([ready[0], bad, ready[1]])
        pieces = {piece.id: piece for piece in decoder.step()}
        assert (pieces[ids[1]].end, pieces[ids[1]].token) == ("error", None) and "NaN" in pieces[ids[1]].error
        assert decoder.running == [ids[0], ids[2]]
    finally:
        bad.changes._made["wte.weight"] = change


# Text


def test_options_that_leave_no_numbers_end_one_text_and_the_others_go_on(model):
    decoder = model("gpt2").decoder()
    row = prompts("gpt2")[4]
    cold = decoder.prompt(row, given("a"), max_new_tokens=NEW, do_sample=True, temperature=1e-300)
    bad, good = decoder.admit([cold, decoder.prompt(row, given("a"), max_new_tokens=NEW)])
    ends = {piece.id: piece.end for piece in decoder.step()}
    assert (ends[bad], decoder.running) == ("error", [good])


def test_pieces_are_the_text_of_all_tokens_and_whole_characters():
    tokenizer = letter_tokenizer()
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    tokens = tokenizer("a né.")["input_ids"] + [2]
    growing = GrowingText(decode)
    pieces = [growing.add(token, last=i == len(tokens) - 1) for i, token in enumerate(tokens)]
    assert pieces == ["a", " ", "n", "", "é", ".", ""]


def test_what_may_become_a_stop_string_is_held_back():
    tokenizer = letter_tokenizer()
    decode = partial(tokenizer.decode, skip_special_tokens=True)

    def pieces(text: str) -> list[str]:
        growing = GrowingText(decode, ["end.", "\n"])
        tokens = tokenizer(text)["input_ids"]
        return [growing.add(token, last=i == len(tokens) - 1) for i, token in enumerate(tokens)]

    assert pieces("an enough") == ["a", "n", " ", "", "", "eno", "u", "g", "h"]
    assert pieces("an end.") == ["a", "n", " ", "", "", "", ""]
    assert pieces("an en") == ["a", "n", " ", "", "en"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_end_before_a_stop_string(model, kind):
    loaded = model(kind)
    whole = loaded.generate("so far", task="a", max_new_tokens=12)[0]
    stop = next(a + b for a, b in pairwise(whole.text[2:]) if (a + b).isascii())
    found = loaded.generate("so far", task="a", max_new_tokens=12, stop_strings=[stop])[0]
    assert found.text == whole.text[: whole.text.index(stop)]
    assert found.end == "stop" and found.tokens == whole.tokens[: len(found.tokens)] != whole.tokens
    beams = loaded.generate("so far", task="a", max_new_tokens=12, stop_strings=[stop], num_beams=2)[0]
    assert stop not in beams.text
    assert "".join(loaded.generate_stream("so far", task="a", max_new_tokens=12, stop_strings=stop)) == found.text


@pytest.mark.parametrize(
    ("text", "stop", "ends"),
    [
        ("so.", ".", True),
        ("so. next", "next", True),
        ("so. next: go", "next", False),  # that was before the last token
        ("a\nb\n", "\n", True),
        ("caf\u00e9", "\u00e9", True),  # of two tokens, the first of which is no character
    ],
)
def test_a_stop_string_ends_a_text_with_the_token_that_completes_it(text, stop, ends):
    tokenizer = letter_tokenizer()
    found = StopStrings(tokenizer, ["never", stop])(torch.tensor([tokenizer.encode(text)]), None)
    assert found.tolist() == [ends]


def test_a_new_stop_string_is_not_compared_with_every_token_of_the_vocabulary(model, monkeypatch):
    """As transformers' criterion does, for minutes: clients of the service make such strings up."""
    loaded = model("gpt2")
    monkeypatch.setattr(type(loaded.core.reader.processor), "get_vocab", lambda _: pytest.fail("the whole vocabulary"))
    assert loaded.generate("so far", task="a", max_new_tokens=2, stop_strings=["x" * 200])[0].tokens


def test_a_seed_makes_sampling_repeatable_whatever_stands_beside(model):
    loaded = model("gpt2")
    options = {"do_sample": True, "seed": 3, "max_new_tokens": NEW}
    alone = loaded.generate("so far", task="a", **options)[0]
    beside = loaded.generate(["and then", "so far"], task="a", **options)[1]
    other = loaded.generate("so far", task="a", **{**options, "seed": 4})[0]
    assert alone.tokens == beside.tokens != other.tokens


def test_every_row_of_a_batch_is_streamed(model):
    loaded = model("llama untied")
    texts = ["so far", "and then", "why not"]
    whole = loaded.generate(texts, max_new_tokens=NEW)
    found = [""] * 3
    order = []
    for place, piece in loaded.generate_pieces(texts, max_new_tokens=NEW):
        found[place] += piece.text
        order.append(place)
    assert found == [one.text for one in whole]
    assert order[:6] == [0, 1, 2, 0, 1, 2]


# Bad calls


def test_an_encoder_decoder_is_written_set_by_set(root):
    loaded = massmerge.load(writer_bundle(root, "t5"))
    with pytest.raises(InputError, match="a T5Model writes for one selected set at a time"):
        loaded.decoder()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"beams": 2}, "no option 'beams'"),
        ({"logprobs": 50}, "from 0 to 20"),
        ({"do_sample": True, "temperature": 0.0}, "cannot generate with .*temperature=0.0"),
    ],
)
def test_wrong_options_are_told_before_a_prompt_joins(model, options, message):
    with pytest.raises(InputError, match=message):
        model("gpt2").decoder().prompt("so far", given("a"), max_new_tokens=2, **options)


def test_a_prompt_without_a_task_cannot_join(model):
    with pytest.raises(InputError, match="no task was selected"):
        model("gpt2").decoder().prompt("so far", given(), max_new_tokens=2)
