"""Conversations: the base's chat template, one begin token, prompts that are too long."""

import json

import pytest
import torch
from click.testing import CliRunner

import massmerge
from massmerge import InputError
from massmerge.cli.main import main
from massmerge.model.chat import empty_prompt, is_conversation, last_turn, render
from massmerge.model.inputs import several
from massmerge.model.route.decide import cast_votes
from massmerge.model.route.first_pass import FirstPass
from massmerge.routing.neutral import NeutralRouter
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.selection import vote
from models import with_options, write_recipe
from writers import chat_tokenizer, make_chat_writers

MESSAGES = [
    {"role": "system", "content": "sad film"},
    {"role": "user", "content": "free prize"},
    {"role": "assistant", "content": "vote"},
    {"role": "user", "content": "a team"},
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    make_chat_writers(folder)
    massmerge.merge(write_recipe(folder, list("abc")), folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="module")
def model(bundle):
    return massmerge.load(bundle)


def test_a_conversation_is_read_as_the_bases_template_writes_it(model):
    expected = model.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    row = model.read(MESSAGES)
    assert row["input_ids"].tolist() == expected
    assert expected.count(1) == 1 and expected[-2:] == model.tokenizer("assistant :").input_ids[1:]


def test_a_text_that_begins_with_the_begin_token_gets_no_second_one(model):
    rendered = render(model.tokenizer, MESSAGES)
    assert model.read(rendered)["input_ids"].tolist() == model.read(MESSAGES)["input_ids"].tolist()
    assert model.read("a team")["input_ids"].tolist()[0] == 1


def test_one_message_a_conversation_and_several_are_told_apart():
    one, two = MESSAGES[1], [MESSAGES, MESSAGES[1:2]]
    assert list(several(one)) == [[one]]
    assert list(several(MESSAGES)) == [MESSAGES]
    assert list(several(two)) == two
    assert is_conversation(MESSAGES) and not is_conversation([]) and not is_conversation(["a"])


def test_parts_of_a_message_are_one_text(tmp_path):
    tokenizer = chat_tokenizer(tmp_path)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "team"}]}]
    assert render(tokenizer, parts) == render(tokenizer, [{"role": "user", "content": "a team"}])


def test_an_empty_prompt_is_the_template_around_nothing(tmp_path):
    assert empty_prompt(chat_tokenizer(tmp_path)) == "<s>user :  ; assistant :"
    assert empty_prompt(chat_tokenizer(tmp_path, None)) is None


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": 3}], "content is text; that of the 'user' message is not"),
        ([{"role": "user"}], "content is text"),
        (MESSAGES[:3], "the last message is the assistant's"),
    ],
)
def test_messages_that_cannot_be_read_are_errors_in_words(tmp_path, messages, message):
    with pytest.raises(InputError, match=message):
        render(chat_tokenizer(tmp_path), messages)


def test_what_a_template_refuses_is_told(tmp_path):
    with pytest.raises(InputError, match="does not take these messages: only users"):
        render(chat_tokenizer(tmp_path, "{{ raise_exception('only users') }}"), MESSAGES)


def test_a_base_without_a_template_cannot_read_messages(tmp_path):
    with pytest.raises(InputError, match="no chat template"):
        render(chat_tokenizer(tmp_path, None), MESSAGES)


def test_a_conversation_is_answered(model):
    rendered = render(model.tokenizer, MESSAGES)
    (from_text,) = model.generate(rendered, task="a", max_new_tokens=4)
    (from_messages,) = model.generate(MESSAGES, task="a", max_new_tokens=4)
    both = model.generate([MESSAGES, MESSAGES[:2]], max_new_tokens=4)
    assert from_messages.tokens == from_text.tokens
    assert len(both) == 2 and both[0].routing is not None
    named = model.generate(messages=[MESSAGES, MESSAGES[:2]], max_new_tokens=4)
    assert [g.tokens for g in named] == [g.tokens for g in both]
    stream = model.generate_stream(messages=MESSAGES, task="a", max_new_tokens=4)
    assert "".join(stream) == from_messages.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give prompts or messages"),
        ({"prompts": "a", "messages": MESSAGES}, "give prompts or messages"),
        ({"messages": ["a"]}, "messages is a list of mappings with a role"),
        ({"messages": []}, "messages is a list of mappings with a role"),
    ],
)
def test_messages_that_are_none_are_an_error(model, given, message):
    with pytest.raises(InputError, match=message):
        model.generate(**given)


def test_a_prompt_that_is_too_long_is_counted_before_it_is_cut(model):
    with pytest.raises(InputError, match="a prompt of 101 tokens and up to 4 new ones are more than the 64"):
        model.generate("a " * 100, max_new_tokens=4)


def test_the_last_turn_of_a_conversation_stands_behind_its_system_prompt():
    assert last_turn(MESSAGES) == [MESSAGES[0], MESSAGES[3]]
    assert last_turn(MESSAGES[:2]) is None and last_turn(MESSAGES[1:2]) is None


def test_a_conversation_is_routed_as_a_whole_and_by_its_last_turn(model):
    (found,) = model.route(MESSAGES)
    tokenizer, stages = model.tokenizer, model.stages
    votes = [
        cast_votes(stages.voters, stages.first.first_pass(model.core.batch([model.read(text)])), stages.first.router)
        for text in (render(tokenizer, MESSAGES), render(tokenizer, [MESSAGES[0], MESSAGES[3]]))
    ]
    scores = [(whole + 0.5 * last) / 1.5 for whole, last in zip(*(v.scores for v in votes), strict=True)]
    assert [*found.residuals.values()] == pytest.approx(vote(scores)[0].tolist(), abs=1e-4)
    mixed = model.route([[MESSAGES[1]], MESSAGES, "a team"])
    assert mixed[1].residuals == pytest.approx(found.residuals, abs=1e-4)
    assert mixed[0].residuals == pytest.approx(model.route([MESSAGES[1]])[0].residuals, abs=1e-4)


def test_adapters_with_random_starts_are_compared_with_the_empty_prompt(bundle, model, tmp_path):
    assert {voter.token for voter in model.stages.voters} == {"mean", "last"}
    first = model.stages.first
    router = first.router.routers[0]
    assert isinstance(router, NeutralRouter)
    (neutral, *_) = first.first_pass(model.core.batch([model.read([{"role": "user", "content": ""}])]))
    expected = NeutralRouter(router.bases, neutral.rows)
    z = first.first_pass(model.core.batch([model.read("a team"), model.read(MESSAGES[:2])]))[0].rows
    assert torch.allclose(router(z), expected(z), atol=1e-5)


def test_the_empty_prompt_is_read_with_the_first_prompt_that_is_routed(bundle, monkeypatch):
    read, real = [], FirstPass.collect
    monkeypatch.setattr(FirstPass, "collect", lambda self, inputs: read.append(inputs) or real(self, inputs))
    model = massmerge.load(bundle)
    model.generate("a team", task="a", max_new_tokens=1)
    assert not read
    model.route("a team")
    assert len(read) == 2
    model.route("a team")
    assert len(read) == 3


@pytest.mark.parametrize(
    ("reference", "kind"), [("none", ProjectionRouter), ("words", NeutralRouter), ("newline", NeutralRouter)]
)
def test_what_tasks_are_compared_with_can_be_chosen(bundle, model, tmp_path, reference, kind):
    other = with_options(bundle, tmp_path / "copy", router={"reference": reference, "token": "last"})
    stages = massmerge.load(other).stages
    assert {voter.token for voter in stages.voters} == {"last"}
    router = stages.first.router.routers[0]
    assert type(router) is kind
    if reference == "newline":
        ids = torch.tensor([model.tokenizer("\n").input_ids])
        (neutral, *_) = stages.first.first_pass({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        z = torch.randn(3, router.stacked.shape[1])
        assert torch.allclose(router(z), NeutralRouter(router.bases, neutral.rows)(z), atol=1e-5)


# The command


def run(*arguments, stdin=None):
    return CliRunner().invoke(main, ["generate", *map(str, arguments)], input=stdin)


def test_the_command_reads_texts_files_and_conversations_as_messages(bundle, model, tmp_path):
    (tmp_path / "one.txt").write_text("a team\n\nfree prize\n")
    (tmp_path / "some.jsonl").write_text(json.dumps({"talk": MESSAGES}) + "\n" + json.dumps({"talk": "a film"}) + "\n")
    files = [tmp_path / "one.txt", tmp_path / "some.jsonl", "-"]
    done = run(bundle, "sad film", *files, "--chat", "--system", "vote", "--column", "talk", "--json", stdin="a\nb\n")
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in done.stdout.splitlines()]
    users = ["sad film", "a team\n\nfree prize\n", None, "a film", "a\nb"]
    told = [{"role": "system", "content": "vote"}]
    talks = [MESSAGES if text is None else [*told, {"role": "user", "content": text}] for text in users]
    assert [row["tokens"] for row in found] == [g.tokens for g in model.generate(talks)]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a", "--system", "b"], 2, "--system is for conversations: add --chat"),
        (["missing.txt", "--chat"], 1, "missing.txt: no such file"),
    ],
)
def test_wrong_calls_are_told(bundle, arguments, code, message):
    done = run(bundle, *arguments)
    assert done.exit_code == code and message in done.output


def test_a_list_that_holds_no_messages_is_an_error_of_its_row(bundle, tmp_path):
    (tmp_path / "some.jsonl").write_text('{"talk": ["a", "b"]}\n')
    done = run(bundle, tmp_path / "some.jsonl", "--column", "talk", "--chat")
    assert done.exit_code == 1 and "not a list of messages" in done.output
