"""The studies of routed peers: sizes against the files, work against a count by hand, heads that are given."""

import csv
import json
import math
from functools import cache

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import massmerge
from massmerge import Bundle, InputError
from massmerge.cli.main import main
from massmerge.io.tensor_file import read_header
from massmerge.merging.open_recipe import open_recipe
from massmerge.model.speed.packed import pack_layers
from massmerge.recipe import Recipe
from massmerge.research.peers import PEERS
from massmerge.research.peers.options import parse_options
from massmerge.research.studies.compute import operations, time_ratios
from massmerge.research.studies.context import StudySettings
from massmerge.research.studies.run import run_studies
from models import FAMILIES, dense_expert, family_bundle, logits_of, rows_of
from study_suite import study_bundle, write_study_suite

LARGE = {"hidden_size": 256, "intermediate_size": 512}  # weights that are worth packing


@pytest.fixture(scope="module")
def bundle(root):
    return study_bundle(root)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return write_study_suite(tmp_path_factory.mktemp("suite"), 6)


@pytest.fixture(scope="module")
def run(bundle, suite, tmp_path_factory):
    out = tmp_path_factory.mktemp("studies")

    @cache
    def found(name, again=0):
        options = {"bundle": bundle, "recipe": bundle.parent / "recipe.yaml", "settings": StudySettings(quick=True)}
        return run_studies(name, suite, out, **options)[0].to_dict()

    return found


# What passes cost


def test_products_are_counted_as_a_count_by_hand_does():
    layer, x, wide = nn.Linear(8, 16), torch.randn(4, 8), torch.randn(2, 5, 8)
    with torch.inference_mode():
        assert operations(lambda: layer(x)) == 2 * 4 * 8 * 16
        assert operations(lambda: torch.zeros(4, 16).addmm_(x, layer.weight.mT)) == 2 * 4 * 8 * 16
        assert operations(lambda: wide @ layer.weight.mT) == 2 * 2 * 5 * 8 * 16
        assert operations(lambda: x + 1) == 0


@torch.inference_mode()
def test_the_count_of_a_model_is_that_of_its_layers_and_its_attention():
    base = FAMILIES["bert"].make_base()
    inputs = FAMILIES["bert"].make_inputs(3)
    tokens = {p: 3 if "pooler" in p else 3 * 7 for p, m in base.named_modules() if isinstance(m, nn.Linear)}
    linear = sum(2 * n * base.get_submodule(p).weight.numel() for p, n in tokens.items())
    attention = 2 * 3 * 2 * (2 * 7 * 7 * 16) * 2  # blocks, inputs, heads; scores and values
    assert operations(lambda: base(**inputs)) == linear + attention


@torch.inference_mode()
def test_the_count_does_not_depend_on_whether_weights_have_been_packed():
    base, inputs = FAMILIES["bert"].make_base(**LARGE), FAMILIES["bert"].make_inputs(3)
    plain = operations(lambda: base(**inputs))
    pack_layers(base)
    assert [operations(lambda: base(**inputs)) for _ in range(8)] == [plain] * 8
    assert any(getattr(layer, "pack", None) and layer.pack._packed is not None for layer in base.modules())


def test_a_call_that_does_twice_the_work_takes_about_twice_the_time():
    x = torch.randn(200, 200)
    runs = {"once": lambda: [x @ x for _ in range(20)], "twice": lambda: [x @ x for _ in range(40)]}
    found = time_ratios(runs, "once", repeats=9)
    assert found["once"] == 1.0
    assert 1.4 < found["twice"] < 2.9


# Heads that are given


@torch.no_grad()
def test_a_told_head_answers_after_the_passes_of_the_set_that_was_routed_to(tmp_path_factory):
    bundle = family_bundle(tmp_path_factory.getbasetemp(), "bert")
    model, inputs = massmerge.load(bundle), FAMILIES["bert"].make_inputs(6, seed=2)
    given = ["a", "b", "c", "c", "b", "a"]
    pairs = model.outcomes(rows_of(inputs), given, batch_size=4)
    assert [free.task for free, _ in pairs] == [p.task for p in model.predict(rows_of(inputs))]
    assert any(free.task != known.task for free, known in pairs), "or nothing is shown"
    for i, (free, known) in enumerate(pairs):
        expert = dense_expert(bundle, "bert", [free.task], given[i])
        wanted = expert(**{k: v[i : i + 1] for k, v in inputs.items()}).logits[0]
        found = logits_of(known)
        assert known.task == given[i]
        assert max(found.values()) == pytest.approx(float(wanted.max()), abs=1e-4)


# storage


def test_sizes_are_those_of_the_files_and_numbers_those_of_the_tensors(run, bundle, tmp_path):
    rows = {row["method"]: row for row in run("storage")["rows"]}
    assert list(rows) == ["base", "mass", *PEERS, "experts"]
    opened = Bundle(bundle)
    plain = sum(math.prod(i.shape) for i in read_header(bundle / "base" / "model.safetensors").values())
    assert (rows["base"]["bytes"], rows["base"]["parameters"]) == (opened.base_bytes, plain)
    kept = sum(
        math.prod(i.shape) for path in bundle.glob("tasks/*/factors.safetensors") for i in read_header(path).values()
    )
    assert (rows["mass"]["bytes"], rows["mass"]["parameters"]) == (opened.counted_bytes, plain + kept)
    sources = open_recipe(Recipe.load(bundle.parent / "recipe.yaml"), bundle.parent, download=False)
    PEERS["arrow"](sources).save(tmp_path)
    file = tmp_path / "model.safetensors"
    numbers = sum(math.prod(i.shape) for i in read_header(file).values())
    assert (rows["arrow"]["bytes"], rows["arrow"]["parameters"]) == (file.stat().st_size, numbers)
    assert rows["arrow"]["of_the_base"] == pytest.approx(file.stat().st_size / opened.base_bytes, abs=1e-4)
    assert rows["experts"]["parameters"] == 3 * plain


def test_work_is_at_least_a_forward_pass_and_that_of_two_passes_is_more(run):
    result = run("storage")
    work = {row["method"]: row["forwards"] for row in result["rows"]}
    assert all(value >= 1.0 for value in work.values())
    assert work["twin"] > 2.0, "the shared expert, then the mixture"
    assert work["arrow"] > 1.0 and 1.0 < work["smile_1"] <= work["smile_2"]
    assert all(one["forwards_timed"] > 0.5 for one in result["times"]["cells"])


def test_the_work_of_models_whose_weights_are_packed_is_that_of_their_products(root, suite, tmp_path, monkeypatch):
    monkeypatch.setattr("massmerge.research.studies.result.write_report", lambda *args: None)
    monkeypatch.setattr("massmerge.research.studies.storage.PEERS", {"smile_2": PEERS["smile_2"]})
    large = study_bundle(root, "large", **LARGE)
    options = {"bundle": large, "recipe": large.parent / "recipe.yaml", "settings": StudySettings(quick=True)}
    (result,) = run_studies("storage", suite, tmp_path, **options)
    work = {row["method"]: row["forwards"] for row in result.finding.rows}
    # Factors of rank 12 and gates of 16 vectors for 3 tasks, beside matrices of 256 by 256 and 256 by 512.
    assert 1.0 < work["mass"] < 2.5
    assert 1.0 < work["smile_2"] < 4.0


def test_a_second_run_gives_the_same_table_of_storage(run):
    first, second = run("storage"), run("storage", again=1)
    assert (first["rows"], first["verdict"]) == (second["rows"], second["verdict"])
    assert first["verdict"]["mass_value"] == pytest.approx(1 - first["rows"][1]["bytes"] / first["rows"][-1]["bytes"])


# options of peers


def test_options_of_peers_are_read_as_their_defaults_are():
    texts = ["smile_1.rank=16", "smile_1.gate=4", "wemoe.rate=1e-4", "smile_2.average_others=true", "wemoe.steps=0"]
    assert parse_options(texts) == {
        "smile_1": {"rank": 16, "gate": 4}, "wemoe": {"rate": 1e-4, "steps": 0}, "smile_2": {"average_others": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("smile.rank=4", "no peer 'smile'. Write PEER.OPTION=VALUE; choose from smile_1, smile_2, wemoe"),
        ("smile_1.ranks=4", "smile_1 has no option 'ranks'. Choose from gate, rank, average_others"),
        ("smile_1.rank", "a whole number from 0 on is wanted"),
        ("smile_1.rank=1.5", "a whole number from 0 on is wanted"),
        ("wemoe.rate=-1", "a number from 0 on is wanted"),
        ("wemoe.rate=nan", "a number from 0 on is wanted"),
        ("smile_1.average_others=yes", "true or false is wanted"),
        ("wemoe.progress=1", "wemoe has no option 'progress'"),
    ],
)
def test_an_option_that_there_is_not_is_named(text, message):
    with pytest.raises(InputError) as error:
        parse_options([text])
    assert repr(text) in str(error.value) and message in str(error.value)


def test_the_command_sets_ranks_of_smile_and_steps_of_wemoe(bundle, suite, tmp_path, monkeypatch):
    monkeypatch.setattr("massmerge.research.studies.result.write_report", lambda *args: None)
    made, real = {}, dict(PEERS)

    def noted(name):
        return lambda sources, inputs=None, **options: (
            made.update({name: options}) or real[name](sources, inputs, **options)
        )

    monkeypatch.setattr(
        "massmerge.research.studies.methods.PEERS", {name: noted(name) for name in ("smile_1", "wemoe")}
    )
    arguments = ["study", "methods", str(suite), "--bundle", str(bundle), "--recipe", str(bundle.parent / "recipe.yaml"),
                 "--out", str(tmp_path), "--quick", "--json", "--peer", "smile_1.rank=2",
                 "--peer", "wemoe.steps=1"]  # fmt: skip
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert made == {"smile_1": {"rank": 2}, "wemoe": {"steps": 1}}
    found = json.loads(done.stdout)
    assert found["settings"]["options"]["peers"] == made
    assert {"smile_1: rank 2.", "wemoe: steps 1."} <= set(found["notes"])
    sizes = {row["method"]: row["bytes"] for row in found["rows"]}
    sources = open_recipe(Recipe.load(bundle.parent / "recipe.yaml"), bundle.parent, download=False)
    assert sizes["smile_1"] == PEERS["smile_1"](sources, rank=2).nbytes < PEERS["smile_1"](sources).nbytes
    refused = CliRunner().invoke(
        main, ["study", "layers", str(suite), "--bundle", str(bundle), "--peer", "arrow.rank=4"]
    )
    assert refused.exit_code == 2 and "--peer arrow: belongs to the studies methods, storage" in refused.output


# oracle


def test_figures_of_told_heads_are_those_of_the_answers(run, bundle, suite):
    rows = {row["method"]: row for row in run("oracle")["rows"]}
    assert list(rows) == ["mass", "smile_1"]
    sources = open_recipe(Recipe.load(bundle.parent / "recipe.yaml"), bundle.parent, download=False)
    for name, method in {"mass": massmerge.load(bundle), "smile_1": PEERS["smile_1"](sources)}.items():
        for task in method.tasks:
            with (suite.parent / f"{task}-test.csv").open() as file:
                texts, labels = zip(*[(row["text"], row["label"]) for row in csv.DictReader(file)], strict=True)
            pairs = method.outcomes(texts, [task] * len(texts))
            given = [known.label == label for (_, known), label in zip(pairs, labels, strict=True)]
            free = [(a.task, a.label) == (task, label) for (a, _), label in zip(pairs, labels, strict=True)]
            assert rows[name]["head_given"]["tasks"][task] == pytest.approx(sum(given) / len(given))
            assert rows[name]["head_chosen"]["tasks"][task] == pytest.approx(sum(free) / len(free))


def test_the_verdict_of_oracle_is_of_the_told_heads(run):
    result = run("oracle")
    means = {row["method"]: row["head_given"]["mean"] for row in result["rows"]}
    assert result["verdict"]["mass_value"] == means["mass"]
    assert result["verdict"]["best_value"] == max(means.values())
    assert (result["verdict"]["why"] != "") == (max(means.values()) > means["mass"])
