"""Generation: against dense checkpoints of each set, routed on the prompt, in mixed batches, as a stream."""

import json
import threading
from functools import partial

import pytest
import torch
import transformers as tf
from click.testing import CliRunner
from peft import PeftModel

import massmerge
from massmerge import InputError
from massmerge.cli.demo.example import make_writing_example
from massmerge.cli.main import main
from massmerge.model.export import export_bundle
from models import family_bundle, text_bundle, with_options, write_recipe
from writers import CLASSES, KINDS, NEW, dense_tokens, dense_writer, make_model, prompts, shifted, writer_bundle


@pytest.fixture(scope="module")
def bundles(root):
    """A bundle of three writers of a kind, made once."""
    return partial(writer_bundle, root)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tasks", [["b"], ["a", "c"]], ids="-".join)
def test_a_set_generates_as_a_dense_checkpoint_of_it(bundles, tmp_path, kind, tasks):
    bundle = with_options(bundles(kind), tmp_path / "copy", router={"top_k": 2, "threshold": 0.0})
    found = massmerge.load(bundle).generate(prompts(kind), task=tasks, max_new_tokens=NEW)
    dense = dense_writer(bundles(kind), kind, tasks)
    assert all(sorted(g.routing.selected) == tasks for g in found)
    assert [g.tokens for g in found] == [dense_tokens(dense, row) for row in prompts(kind)]


@pytest.mark.parametrize("kind", ["t5 untied", "gpt2"])
def test_the_language_model_of_a_set_has_the_logits_of_a_dense_checkpoint(bundles, kind):
    sets = massmerge.load(bundles(kind)).sets
    changes = sets.changes((1,))
    batch = {"input_ids": prompts(kind)[4]["input_ids"][None]}
    if kind.startswith("t5"):
        batch["decoder_input_ids"] = torch.tensor([[0, 5, 9]])
    from massmerge.model.second_pass.segments import Segment, Segments, running

    with torch.inference_mode(), running(Segments((Segment(changes, 0, 1),), 1)):
        found = sets.language_models.of(changes)(**batch).logits
    with torch.inference_mode():
        expected = dense_writer(bundles(kind), kind, ["b"])(**batch).logits
    assert float((found - expected).abs().max()) < 2e-3 * float(expected.abs().max())


@pytest.mark.parametrize("kind", ["t5", "gpt2", "llama untied"])
def test_prompts_of_a_mixed_batch_are_routed_and_answered_one_by_one(bundles, kind):
    model = massmerge.load(bundles(kind))
    rows = prompts(kind, 10)
    together = model.generate(rows, batch_size=10, max_new_tokens=NEW)
    assert len({g.task for g in together}) > 1
    alone = [model.generate([row], max_new_tokens=NEW)[0] for row in rows]
    assert [(g.task, g.tokens) for g in together] == [(g.task, g.tokens) for g in alone]
    assert [g.task for g in together] == [r.selected[0] for r in model.route(rows)]
    told = [
        model.generate([row], task=g.task, max_new_tokens=NEW)[0].tokens for row, g in zip(rows, alone, strict=True)
    ]
    assert told == [g.tokens for g in alone]


def test_prompts_of_a_session_share_a_decision_within_a_call_and_from_call_to_call(bundles):
    model = massmerge.load(bundles("gpt2"))
    given = prompts("gpt2", 6)
    routed = [r.selected for r in model.route(given, session="x")]
    assert [g.routing.selected for g in model.generate(given, session="x", max_new_tokens=1)] == routed
    assert len({tuple(selected) for selected in routed}) == 1
    memory, alone = massmerge.Sessions(decay=1.0), massmerge.Sessions(decay=1.0)
    found = [model.generate([one], session="x", memory=memory, max_new_tokens=1)[0].routing.residuals for one in given]
    expected = [model.route([one], session="x", memory=alone)[0].residuals for one in given]
    assert found == [pytest.approx(one) for one in expected]


@pytest.mark.parametrize("kind", ["gpt2"])
def test_beams_and_several_texts_are_those_of_transformers(bundles, kind):
    options = {"num_beams": 3, "num_return_sequences": 2}
    found = massmerge.load(bundles(kind)).generate(prompts(kind, 2), task="a", max_new_tokens=NEW, **options)
    dense = dense_writer(bundles(kind), kind, ["a"])
    assert [g.tokens for g in found] == [dense_tokens(dense, row, **options) for row in prompts(kind, 2)]


def test_hot_sets_with_dense_weights_generate_the_same(bundles):
    plain, cached = massmerge.load(bundles("llama untied")), massmerge.load(bundles("llama untied"), cache="10MB")
    for _ in range(4):
        found = cached.generate(prompts("llama"), max_new_tokens=NEW)
    assert cached.sets.cache.held_bytes > 0
    assert [g.tokens for g in found] == [g.tokens for g in plain.generate(prompts("llama"), max_new_tokens=NEW)]


def test_an_adapter_of_an_untied_decoder_writes_with_the_bases_own_head(tmp_path):
    from peft import LoraConfig, get_peft_model

    base = shifted(make_model("llama untied"), 1, 0.3)
    base.save_pretrained(tmp_path / "base")
    for seed, task in enumerate("ab"):
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        adapter = get_peft_model(tf.LlamaForCausalLM.from_pretrained(tmp_path / "base"), config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapter.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        adapter.save_pretrained(tmp_path / task)
    massmerge.merge(write_recipe(tmp_path, ["a", "b"], rank=8), tmp_path / "bundle")
    assert massmerge.Bundle(tmp_path / "bundle").head_bytes > base.lm_head.weight.nbytes
    found = massmerge.load(tmp_path / "bundle").generate(prompts("llama"), task="b", max_new_tokens=NEW)
    dense = adapter.merge_and_unload().eval()
    expected = [dense_tokens(dense, row) for row in prompts("llama")]
    assert [g.tokens for g in found] == expected
    export_bundle(tmp_path / "bundle", tmp_path / "plain", "hf", ["b"])
    plain = tf.LlamaForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert [dense_tokens(plain, row) for row in prompts("llama")] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_on_the_bundles_base_writes_as_a_dense_checkpoint(bundles, tmp_path, kind):
    export_bundle(bundles(kind), tmp_path / "out", "peft", ["b"])
    base = CLASSES[kind.partition(" ")[0]].from_pretrained(bundles(kind) / "base")
    model = PeftModel.from_pretrained(base, tmp_path / "out" / "b").eval()
    dense = dense_writer(bundles(kind), kind, ["b"])
    assert [dense_tokens(model, row) for row in prompts(kind)] == [dense_tokens(dense, row) for row in prompts(kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_a_set_is_a_language_model_that_writes_as_the_set_does(bundles, tmp_path, kind):
    part = export_bundle(bundles(kind), tmp_path / "out", "hf", ["a", "c"]).parts[0]
    kept = json.loads((tmp_path / "out" / "config.json").read_text())["architectures"]
    model = CLASSES[kind.partition(" ")[0]].from_pretrained(tmp_path / "out").eval()
    dense = dense_writer(bundles(kind), kind, ["a", "c"])
    assert (part.head, kept) == ("inside", [type(model).__name__])
    assert [dense_tokens(model, row) for row in prompts(kind)] == [dense_tokens(dense, row) for row in prompts(kind)]


def test_the_bases_generation_configuration_is_kept(tmp_path):
    base = shifted(make_model("gpt2"), 1, 0.3)
    base.generation_config.max_new_tokens = 3
    base.save_pretrained(tmp_path / "base")
    shifted(base, 2, 0.1).save_pretrained(tmp_path / "a")
    massmerge.merge(write_recipe(tmp_path, ["a"], rank=8), tmp_path / "bundle")
    model = massmerge.load(tmp_path / "bundle")
    assert len(model.generate(prompts("gpt2", 1))[0].tokens) <= 3
    assert len(model.generate(prompts("gpt2", 1), max_new_tokens=5, min_new_tokens=5)[0].tokens) == 5


# Text


@pytest.fixture(scope="module")
def writing(tmp_path_factory):
    """The example that writes, with its tokenizer."""
    folder = tmp_path_factory.mktemp("writing")
    massmerge.merge(make_writing_example(folder), folder / "out")
    return folder / "out"


def test_a_stream_is_the_same_text_in_pieces(writing):
    model = massmerge.load(writing)
    whole = model.generate("win a prize", max_new_tokens=8)[0]
    stream = model.generate_stream("win a prize", max_new_tokens=8)
    assert stream.task == whole.task
    assert "".join(stream) == whole.text != ""


def test_a_stream_that_is_left_early_leaves_no_thread_behind(writing):
    before = set(threading.enumerate())
    pieces = iter(massmerge.load(writing, check=False).generate_stream("a b c", max_new_tokens=500, min_new_tokens=500))
    next(pieces)
    pieces.close()
    assert set(threading.enumerate()) <= before


def test_a_fault_of_a_stream_reaches_who_reads_it(writing):
    def refuse(batch: int, tokens: torch.Tensor) -> list[int]:
        raise RuntimeError("no more words")

    with pytest.raises(RuntimeError, match="no more words"):
        list(massmerge.load(writing).generate_stream("a", prefix_allowed_tokens_fn=refuse))


def test_a_model_that_abstains_writes_nothing(writing):
    model = massmerge.load(writing)
    found = model.generate(["win a prize", "a team"], unknown={"lift": 1e6})
    assert [(g.task, g.text, g.tokens) for g in found] == [(None, None, [])] * 2
    assert found[0].routing.residuals


def test_an_explanation_of_a_text_shows_how_its_prompt_was_routed(writing, tmp_path):
    picture = tmp_path / "p.png"
    done = CliRunner().invoke(main, ["explain", str(writing), "win a prize", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    written = massmerge.load(writing).generate("win a prize")[0]
    assert done.output.startswith(f"{written.task}: {written.text}")
    assert "selected" in done.output and "generation" in done.output
    assert picture.is_file()


# Bad input


def test_an_encoder_generates_nothing(root):
    bundle = text_bundle(root)
    with pytest.raises(InputError, match="a BertModel generates no text"):
        massmerge.load(bundle).generate("win a prize")
    done = run(bundle, "win a prize")
    assert done.exit_code == 2 and "a BertModel generates no text" in done.output and "Use `predict`" in done.output


def test_a_classifier_on_a_decoder_generates_nothing(root):
    model = massmerge.load(family_bundle(root, "gpt2"))
    with pytest.raises(InputError, match="a, b, c: answers with labels, not with text"):
        model.generate(prompts("gpt2"))


def test_a_decoder_without_heads_is_told_to_generate(bundles, writing):
    with pytest.raises(InputError, match="Use `generate`, `embed` or `route`"):
        massmerge.load(bundles("llama untied")).predict(prompts("llama"))
    done = CliRunner().invoke(main, ["predict", str(writing), "win a prize"])
    assert done.exit_code == 2 and "question, summary: no head" in done.output and "Use `generate`" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 3}, "generation has no option 'beams'"),
        ({"output_scores": True}, "generation has no option 'output_scores'"),
        ({"max_new_tokens": -1}, "do not go together: .*max_new_tokens"),
        (
            {"temperature": 0.0, "do_sample": True},
            "cannot generate with temperature=0.0, do_sample=True: .*strictly positive",
        ),
        ({"num_beams": 0}, "cannot generate with num_beams=0"),
        ({"task": "x"}, "no task 'x'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_options_that_there_are_not_are_errors(writing, options, message):
    with pytest.raises(InputError, match=message):
        massmerge.load(writing).generate("a", **options)


def test_a_stream_has_no_beams(writing):
    with pytest.raises(InputError, match="a stream is one text"):
        massmerge.load(writing).generate_stream("a", num_beams=2)


def test_a_prompt_that_leaves_a_decoder_no_room_is_an_error_of_its_row(bundles):
    long = {"input_ids": torch.full((38,), 5)}
    found = massmerge.load(bundles("gpt2")).generate([long, *prompts("gpt2", 1)], on_error="row", max_new_tokens=NEW)
    assert "a prompt of 38 tokens and up to 6 new ones are more than the 40" in found[0].error
    assert found[1].tokens


# The command


def run(*arguments, stdin=None):
    return CliRunner().invoke(main, ["generate", *map(str, arguments)], input=stdin)


def test_the_command_writes_what_the_model_writes(writing):
    done = run(
        writing, "win a prize", "-", "--json", "--max-new-tokens", 5, "--option", "num_beams=2", stdin="so sad\n"
    )
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in done.stdout.splitlines()]
    expected = massmerge.load(writing).generate(["win a prize", "so sad"], max_new_tokens=5, num_beams=2)
    assert [(r["input"], r["task"], r["text"]) for r in found] == [
        ("win a prize", expected[0].task, expected[0].text),
        ("-:1", expected[1].task, expected[1].text),
    ]


def test_the_command_streams_one_prompt(writing):
    done = run(writing, "win a prize", "--stream", "--max-new-tokens", 5)
    assert done.stdout.strip() == massmerge.load(writing).generate("win a prize", max_new_tokens=5)[0].text.strip()


def test_a_prompt_that_cannot_be_read_is_told_and_the_others_are_answered(writing):
    done = run(writing, "missing.txt", "so sad", "--max-new-tokens", 3)
    assert done.exit_code == 1
    assert "missing.txt: no such file" in done.output and "so sad" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b", "--stream"], "--stream is for one prompt; there are 2"),
        (["a", "--stream", "--json"], "Choose one"),
        (["a", "--option", "num_beams"], "write NAME=VALUE"),
        (["a", "--option", "batch_size=2"], "not an option of generate"),
        (["a", "--option", "beams=2"], "generation has no option 'beams'"),
        (["missing.txt", "--stream"], "no such file"),
    ],
)
def test_wrong_calls_end_with_code_2(writing, arguments, message):
    done = run(writing, *arguments)
    assert done.exit_code == 2
    assert message in done.output
