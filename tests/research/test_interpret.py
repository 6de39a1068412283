"""TextSpan: the algebra against a naive twin, what it finds where the answer is known, and the verb."""

import json

import pytest
import torch
import transformers as tf
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import massmerge
from clip_models import write_clip
from massmerge import InputError
from massmerge.cli.main import main
from massmerge.io.tensor_file import read_header, read_tensor
from massmerge.research.interpret import interpret, text_span
from massmerge.research.interpret.decoding import BANK, read_bank
from models import image_bundle, text_bundle, write_recipe

WORDS = [
    "win a prize",
    "so sad",
    "vote on the law",
    "the team",
    "a gene",
    "good film",
    "bad song",
    "a star",
    "call now",
]


def naive_text_span(vectors, texts, top):
    """The paper's steps, one by one, with dense projections and no coordinates."""
    vectors, texts = vectors.double(), texts.double()
    inverse = torch.linalg.pinv(vectors @ vectors.T)
    texts = texts @ (vectors.T @ inverse @ vectors)
    vectors = vectors - vectors.mean(0)
    picked = []
    for _ in range(top):
        spread = torch.stack([torch.std(vectors @ text, correction=0) for text in texts])
        spread[picked] = -1
        best = int(spread.argmax())
        picked.append(best)
        direction = texts[best] / texts[best].norm()
        keep = torch.eye(len(direction), dtype=torch.float64) - torch.outer(direction, direction)
        vectors, texts = vectors @ keep, texts @ keep
    return picked


def cases(seed: int, k: int = 6, width: int = 12, count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    strength = torch.exp(-torch.arange(k) / 3.0)
    v = torch.linalg.qr(torch.randn(width, k, generator=generator)).Q.T
    return strength[:, None] * v, normalize(torch.randn(count, width, generator=generator), dim=1)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 8))
def test_the_picks_are_those_of_the_naive_twin(seed, k):
    vectors, texts = cases(seed, k)
    assert [pick.position for pick in text_span(vectors, texts, k - 1)] == naive_text_span(vectors, texts, k - 1)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 9))
def test_no_text_is_picked_twice_and_shares_are_parts_of_the_whole(seed, k):
    picks = text_span(*cases(seed, k), top=40)
    assert len({pick.position for pick in picks}) == len(picks) <= k
    assert all(pick.share >= 0 for pick in picks)
    assert sum(pick.share for pick in picks) <= 1 + 1e-9


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_the_order_of_the_bank_does_not_matter(seed):
    vectors, texts = cases(seed)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    direct = [pick.position for pick in text_span(vectors, texts, 5)]
    assert [int(order[pick.position]) for pick in text_span(vectors, texts[order], 5)] == direct


def test_texts_along_the_strongest_vectors_are_found_in_their_order():
    vectors = torch.diag(torch.tensor([9.0, 6.0, 3.0, 1.0]))
    texts = torch.eye(8)[[7, 2, 0, 5, 1, 6]][:, :4] + 1e-3
    picks = text_span(vectors, normalize(texts, dim=1), 3)
    assert [pick.position for pick in picks] == [2, 4, 1]
    assert [pick.score for pick in picks] == sorted((pick.score for pick in picks), reverse=True)


def test_more_vectors_than_dimensions_are_no_fault():
    vectors = torch.randn(30, 5)
    assert len(text_span(vectors, normalize(torch.randn(20, 5), dim=1), 10)) == 5


def test_vectors_that_do_not_differ_explain_nothing():
    assert text_span(torch.ones(3, 4), normalize(torch.randn(9, 4), dim=1), 3) == []


# The bank


def test_the_bank_that_comes_with_mass_is_the_one_that_its_script_makes():
    import runpy
    from pathlib import Path

    made = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "text_bank.py"))
    assert read_bank() == made["bank"]()
    assert BANK.stat().st_size < made["MOST_BYTES"]
    assert len(read_bank()) > 2000


# Bundles


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.getbasetemp()


def test_a_text_model_is_decoded_in_its_own_stream(root):
    bundle = text_bundle(root)
    found = interpret(bundle, WORDS, tasks=["topic"], sites=["M2"], top=4)
    assert [(one.task, one.site) for one in found] == [("topic", "M2")]
    base = tf.BertModel.from_pretrained(bundle / "base").eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(bundle / "processor")
    seen = []
    base.encoder.layer[2].intermediate.dense.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].mean(0)))
    with torch.inference_mode():
        for text in WORDS:
            base(**tokenizer(text, return_tensors="pt"))
    stream = torch.stack(seen)
    header = read_header(bundle / "tasks" / "topic" / "factors.safetensors")
    s, v = (read_tensor(header[f"encoder.layer.2.intermediate.dense.weight.{part}"]) for part in "sv")
    expected = naive_text_span(s[:, None] * v, normalize(stream - stream.mean(0), dim=1), 4)
    assert [text.text for text in found[0].texts] == [WORDS[i] for i in expected]


def test_the_default_site_is_a_late_one_and_every_task_is_decoded(root):
    bundle = text_bundle(root)
    found = interpret(bundle, WORDS, top=2, tasks=["spam", "topic"])
    assert {one.task for one in found} == {"spam", "topic"}
    assert {one.site for one in found} == {"M3"}
    with_adapter = interpret(bundle, WORDS, top=2)  # which leaves the MLPs alone
    assert [one.task for one in with_adapter] == ["spam", "topic", "mood"]
    assert {one.site for one in with_adapter} == {"A3"}


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A bundle of two experts of a tiny CLIP's vision tower."""
    folder = write_clip(tmp_path_factory.mktemp("clip"))
    massmerge.merge(write_recipe(folder, ["pets", "cars"], rank=8), folder / "bundle")
    return folder / "bundle"


def test_a_clip_is_decoded_through_its_projection_and_text_tower(clip):
    whole = clip.parent / "base"
    found = interpret(clip, WORDS, tasks=["cars"], sites=["M1"], top=4, clip=str(whole))
    model, tokenizer = tf.CLIPModel.from_pretrained(whole).eval(), tf.AutoTokenizer.from_pretrained(whole)
    with torch.inference_mode():
        texts = [model.get_text_features(**tokenizer(text, return_tensors="pt")).pooler_output[0] for text in WORDS]
    header = read_header(clip / "tasks" / "cars" / "factors.safetensors")
    name = next(n for n in header if "layers.1.mlp.fc1.weight" in n).rpartition(".")[0]
    s, v = (read_tensor(header[f"{name}.{part}"]) for part in "sv")
    vectors = (s[:, None] * v) @ model.visual_projection.weight.detach().T
    expected = naive_text_span(vectors, normalize(torch.stack(texts), dim=1), 4)
    assert [text.text for text in found[0].texts] == [WORDS[i] for i in expected]


# Bad input


def test_an_image_model_without_a_text_tower_is_told_what_it_lacks(root, clip):
    with pytest.raises(InputError, match="no CLIP model with a text tower can be opened"):
        interpret(image_bundle(root), WORDS, top=2)
    with pytest.raises(InputError, match="without a visual projection from the 64 features"):
        interpret(clip, WORDS, top=2, clip=str(text_bundle(root) / "base"))


def test_a_siglip_tower_is_refused_and_a_tower_of_another_kind_takes_no_clip(clip, tmp_path):
    write_clip(tmp_path, "siglip")
    massmerge.merge(write_recipe(tmp_path, ["pets"], rank=8), tmp_path / "bundle")
    with pytest.raises(InputError, match=r"a SiglipVisionModel cannot be decoded: .* CLIP's towers can be"):
        interpret(tmp_path / "bundle", WORDS, top=2, clip=str(tmp_path / "base"))
    with pytest.raises(InputError, match=r"a SiglipModel without a visual projection .* bundle's CLIPVisionModel"):
        interpret(clip, WORDS, top=2, clip=str(tmp_path / "base"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 10}, "the bank: has 9 texts, but 10 are requested"),
        ({"top": 0}, "0 are requested"),
        ({"tasks": ["x"]}, "no task 'x'"),
        ({"sites": ["M99"]}, "no site 'M99'"),
        ({"tasks": ["mood"], "sites": ["M1"]}, "task mood: changes nothing at M1"),
    ],
)
def test_wrong_questions_are_errors(root, options, message):
    with pytest.raises(InputError, match=message):
        interpret(text_bundle(root), WORDS, **{"top": 3, **options})


# The command


def run(*arguments):
    return CliRunner().invoke(main, ["interpret", *map(str, arguments)])


def test_the_command_gives_what_the_function_gives_and_draws_it(root, tmp_path):
    bundle = text_bundle(root)
    (tmp_path / "bank.txt").write_text("\n".join([*WORDS, "", WORDS[0]]) + "\n")
    small = run(bundle, "--texts", tmp_path / "bank.txt", "--top", 10)
    assert small.exit_code == 2 and "bank.txt: has 9 texts, but 10 are requested. Use a larger bank" in small.output
    options = [
        "--texts",
        tmp_path / "bank.txt",
        "--task",
        "spam",
        "--site",
        "M1",
        "--top",
        3,
        "--plot",
        tmp_path / "p.png",
    ]
    done = run(bundle, *options, "--json")
    assert done.exit_code == 0, done.output
    expected = interpret(bundle, WORDS, tasks=["spam"], sites=["M1"], top=3)
    assert json.loads(done.stdout) == [one.to_dict() for one in expected]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--texts", "none.txt"], "none.txt: cannot be read as one text per line"),
        (["--plot", "p.doc"], "Use .png, .svg or .pdf"),
        (["--site", "M77"], "no site 'M77'"),
    ],
)
def test_wrong_calls_end_with_code_2(root, arguments, message):
    done = run(text_bundle(root), *arguments)
    assert done.exit_code == 2
    assert message in done.output
