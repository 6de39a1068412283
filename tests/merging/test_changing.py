"""Tasks added to a bundle and removed from it, without the experts of the others."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers as tf
import yaml
from safetensors.torch import load_file, save_file

import massmerge
from changes import TASKS, bundles, run, write_adapter, write_decoder
from massmerge import Bundle
from massmerge.bundle.layout import ROUTER
from massmerge.bundle.manifest import read_manifest, sign_manifest
from massmerge.io.checksums import file_sha256
from massmerge.merging.verify import verify_bundle
from massmerge.model.calibrate import calibrate
from models import FAMILIES, contents, rows_of, text_bundle, write_family, write_recipe


def assert_close(found: Path, wanted: Path, *, rounding: float = 3e-4) -> None:
    """Two bundles say the same of every task: ranks, updates, whole tensors, what the merge recorded of them.

    Factors of random experts, whose singular values hardly differ, are cut to no more than that from the best ones.
    """
    one, other = Bundle(found), Bundle(wanted)
    assert [t.name for t in one.tasks] == [t.name for t in other.tasks]
    assert [(t.source, t.form, t.head, t.labels) for t in one.tasks] == [
        (t.source, t.form, t.head, t.labels) for t in other.tasks
    ]
    assert one.ranks == other.ranks
    for task in one.tasks:
        assert one.headers[task.name].keys() == other.headers[task.name].keys()
        for name in one.ranks:
            a, b = one.factors(task.name, name), other.factors(task.name, name)
            if b is not None:
                a, b = (f._replace(u=f.u.float(), v=f.v.float()).dense() for f in (a, b))
                assert (a - b).norm() <= rounding * b.norm(), (task.name, name)
    for name in ("norm", "energy", "cosine"):
        torch.testing.assert_close(one.statistics[name], other.statistics[name], atol=rounding, rtol=rounding)


# A task that is added is as if it had always been there


@pytest.mark.parametrize("family", FAMILIES)
def test_an_added_task_gives_the_bundle_that_a_merge_of_all_gives(tmp_path, family):
    whole, part = bundles(tmp_path, family)
    massmerge.add(part, {"c": "c"}, folder=tmp_path)
    assert_close(part, whole)
    rows = rows_of(FAMILIES[family].make_inputs(4))
    one, other = massmerge.load(part), massmerge.load(whole)
    assert torch.allclose(one.embed(rows), other.embed(rows), atol=1e-4)
    assert [r.selected for r in one.route(rows)] == [r.selected for r in other.route(rows)]


@pytest.mark.parametrize(
    "sections",
    [
        {"merge": {"rank": "1/T"}, "family": "distilbert"},  # without token types, whose two rows are cut for two tasks
        {"merge": {"rank": 5}},
        {"merge": {"rank": 0.9}},
        {"merge": {"budget": 2.5}, "router": {"first_pass": "fixed", "site": "M1"}},
        {"merge": {"base": "by_reference"}},
    ],
    ids=["1/T", "rank", "energy", "fixed", "by reference"],
)
def test_so_it_does_by_every_rule(tmp_path, sections):
    whole, part = bundles(tmp_path, **sections)
    massmerge.add(part, {"c": "c"}, folder=tmp_path)
    assert_close(part, whole)
    if "router" in sections:
        ours, theirs = load_file(part / "fixed.safetensors"), load_file(whole / "fixed.safetensors")
        assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}


def test_an_adapter_can_be_added_and_kept(tmp_path):
    write_family(tmp_path, "bert", {"a": 2, "b": 3})
    for seed, task in enumerate(["lora", "more"]):
        options = {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}
        write_adapter(tmp_path, task, tf.BertForSequenceClassification, seed, **options)
    whole = massmerge.merge(write_recipe(tmp_path, ["a", "lora", "more", "b"]), tmp_path / "whole")
    part = massmerge.merge(write_recipe(tmp_path, ["a", "lora"]), tmp_path / "part")
    massmerge.add(part, {"more": "more", "b": "b"}, folder=tmp_path)
    assert_close(part, whole)


def test_factors_in_half_precision_are_cut_and_stay_in_it(tmp_path):
    family = FAMILIES["bert"]
    base = family.make_base()
    for task, labels in TASKS.items():
        family.make_expert(base, labels, labels).to(torch.float16).save_pretrained(tmp_path / task)
    base.to(torch.float16).save_pretrained(tmp_path / "base")
    whole = massmerge.merge(write_recipe(tmp_path, list("abc")), tmp_path / "whole")
    part = massmerge.merge(write_recipe(tmp_path, list("ab")), tmp_path / "part")
    massmerge.add(part, {"c": "c"}, folder=tmp_path)
    assert_close(part, whole, rounding=2e-3)
    assert (
        load_file(part / "tasks/a/factors.safetensors")["encoder.layer.0.output.dense.weight.u"].dtype is torch.float16
    )


def test_the_same_change_gives_the_same_bytes(tmp_path):
    _, part = bundles(tmp_path)
    first = massmerge.add(part, {"c": "c"}, out=tmp_path / "first", folder=tmp_path, workers=1)
    second = massmerge.add(part, {"c": "c"}, out=tmp_path / "second", folder=tmp_path, workers=2)
    assert contents(first) == contents(second)
    assert [t.name for t in Bundle(part).tasks] == ["a", "b"]


def test_original_experts_still_verify_a_bundle_that_was_changed(tmp_path):
    _, part = bundles(tmp_path)
    massmerge.add(part, {"c": "c"}, folder=tmp_path)
    found = verify_bundle(part, experts=True, folder=tmp_path)
    assert found.ok and [t.task for t in found.tasks] == ["a", "b", "c"]


@pytest.mark.parametrize("rule", [{"budget": 2.0}, {"rank": "1/T"}, {"rank": 30}])
def test_a_matrix_smaller_than_the_number_of_tasks_comes_and_goes_with_tasks(tmp_path, rule):
    name = "embeddings.token_type_embeddings.weight"  # two rows: factors for two tasks, whole for three
    write_family(tmp_path, "bert", {"a": 2, "b": 3, "c": 4})
    two, three = (
        massmerge.merge(write_recipe(tmp_path, list(tasks), **rule), tmp_path / tasks) for tasks in ("ab", "abc")
    )
    assert name in massmerge.Bundle(two).ranks and name not in massmerge.Bundle(three).ranks
    before = contents(three / "tasks")
    massmerge.remove(three, "c")
    assert contents(three / "tasks") == {path: data for path, data in before.items() if not path.startswith("c/")}
    massmerge.add(two, {"c": "c"}, folder=tmp_path)
    assert verify_bundle(two, experts=True, folder=tmp_path).ok
    assert (name in massmerge.Bundle(two).ranks) is (rule == {"rank": "1/T"})  # what was cut off cannot be made whole


def test_a_language_head_that_the_bundle_keeps_for_the_base_is_carried_over(tmp_path):
    write_decoder(tmp_path)
    for seed, task in enumerate("abc"):
        write_adapter(tmp_path, task, tf.LlamaForCausalLM, seed, target_modules=["q_proj"], task_type="CAUSAL_LM")
    part = massmerge.merge(write_recipe(tmp_path, ["a", "b"]), tmp_path / "part")
    before = contents(part / "base")
    assert "head/model.safetensors" in before
    massmerge.add(part, {"c": "c"}, folder=tmp_path)
    assert contents(part / "base") == before
    massmerge.remove(part, ["a", "b"])
    assert contents(part / "base") == before


# What is removed is gone, and the rest stays as it was


@pytest.mark.parametrize("family", ["bert", "vit", "clip", "t5", "gpt2"])
def test_removal_leaves_base_and_other_tasks_to_the_byte(tmp_path, family):
    whole, _ = bundles(tmp_path, family)
    before = contents(whole)
    massmerge.remove(whole, "b")
    after = contents(whole)
    assert not any(name.startswith("tasks/b/") for name in after)
    same = [n for n in before if n.startswith(("base/", "processor/", "tasks/a/", "tasks/c/"))]
    assert same and all(after[name] == before[name] for name in same)
    assert after.keys() == {n for n in before if not n.startswith("tasks/b/")}
    statistics = Bundle(whole).statistics
    assert statistics["norm"].shape[1] == 2 and statistics["cosine"].shape[1:] == (2, 2)
    rows = rows_of(FAMILIES[family].make_inputs(2))
    assert set(massmerge.load(whole).route(rows)[0].weights) == {"a", "c"}


def test_a_task_can_come_back(tmp_path):
    whole, _ = bundles(tmp_path)
    before = Bundle(whole).ranks
    massmerge.remove(whole, "c")
    massmerge.add(whole, {"c": "c"}, folder=tmp_path)
    assert Bundle(whole).ranks == before
    assert_close(whole, massmerge.merge(tmp_path / "all.yaml", tmp_path / "again"))


@pytest.mark.parametrize(
    ("groups", "gone", "left"),
    [
        ([["a/LABEL_0", "b/LABEL_0"], ["a/LABEL_1", "b/LABEL_1", "c/LABEL_1"]], "b", [["a/LABEL_1", "c/LABEL_1"]]),
        ([["a/LABEL_0", "b/LABEL_0"], ["c/LABEL_1", "a/LABEL_0"]], "a", [["b/LABEL_0", "c/LABEL_1"]]),
    ],
    ids=["its own go with it", "those shared through it stay shared"],
)
def test_labels_shared_with_a_removed_task(tmp_path, groups, gone, left):
    write_family(tmp_path, "bert", TASKS)
    recipe = write_recipe(tmp_path, list("abc"))
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "shared_labels": groups}))
    out = massmerge.merge(recipe, tmp_path / "out")
    massmerge.remove(out, gone)
    assert Bundle(out).recipe.shared_labels == left


def test_experts_given_from_another_folder_are_found_again(tmp_path):
    _, part = bundles(tmp_path / "first")
    (tmp_path / "second").mkdir()
    shutil.move(tmp_path / "first" / "c", tmp_path / "second" / "new")
    massmerge.add(part, {"c": "new"}, folder=tmp_path / "second")
    assert Bundle(part).tasks[2].source == str(tmp_path / "second" / "new")
    assert verify_bundle(part, experts=True, folder=tmp_path / "first").ok


def test_the_last_task_answers_everything(tmp_path):
    whole, _ = bundles(tmp_path)
    massmerge.remove(whole, ["a", "c"])
    rows = rows_of(FAMILIES["bert"].make_inputs(2))
    assert {p.task for p in massmerge.load(whole).predict(rows)} == {"b"}


def test_a_router_of_a_version_that_kept_no_means_is_left_out_with_a_warning(root, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(text_bundle(root), out)
    calibrate(out, {"spam": ["win now"], "topic": ["the match"], "mood": ["so sad"]})
    forget_moments(out)
    done = run("remove", out, "mood")
    assert done.exit_code == 0, done.output
    assert "linear router was fitted" in done.stderr and "mass calibrate" in done.stderr
    assert "router.safetensors" not in contents(out)
    assert massmerge.load(out).predict("so sad")[0].task in ("spam", "topic")


def forget_moments(bundle):
    """The router's file as older versions wrote it."""
    tensors = {n: t for n, t in load_file(bundle / ROUTER).items() if not n.startswith("moments.")}
    save_file(tensors, bundle / ROUTER)
    manifest = read_manifest(bundle)
    entry = {"bytes": (bundle / ROUTER).stat().st_size, "sha256": file_sha256(bundle / ROUTER)}
    sign_manifest(bundle, {**manifest, "files": {**manifest["files"], ROUTER: entry}})


# The verbs


def test_the_verbs_change_a_bundle_in_place_and_say_what_they_wrote(tmp_path, monkeypatch):
    _, part = bundles(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = run("add", "two", "c=c")
    assert done.exit_code == 0, done.output
    assert "3 tasks on base" in done.stderr and "two: " in done.stdout and "times the base" in done.stdout
    done = run("remove", "two", "a", "c", "--json")
    assert done.exit_code == 0 and '"tasks": [\n    "b"\n  ]' in done.stdout
    assert [t.name for t in Bundle(part).tasks] == ["b"]
    assert not list(tmp_path.glob(".*.partial"))


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path, monkeypatch):
    bundles(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    added, removed = run("add", "two", "c=c", "--dry-run"), run("remove", "all", "a", "--dry-run", "--json")
    assert added.exit_code == removed.exit_code == 0
    assert "3 tasks on base" in added.stdout and '"name": "b"' in removed.stdout
    assert contents(tmp_path) == before
    (tmp_path / "two" / "notes.txt").write_text("mine")
    for options in ((), ("--out", "base"), ("--out", "all"), ("--out", "two/inside")):
        assert run("add", "two", "c=c", *options, "--dry-run").exit_code == 2, options
    assert run("add", "two", "c=c", "--out", "all", "--overwrite", "--dry-run").exit_code == 0


def test_a_file_describes_heads_and_labels_of_new_tasks(tmp_path):
    _, part = bundles(tmp_path)
    (tmp_path / "more").mkdir()
    shutil.move(tmp_path / "c", tmp_path / "more" / "c")
    labels = ["one", "two", "three", "four"]
    save_file({"weight": torch.randn(2, 32)}, tmp_path / "more" / "head.safetensors")
    head = {"weights": "head.safetensors", "labels": ["no", "yes"]}
    tasks = [{"name": "c", "expert": "c", "labels": labels}, {"name": "d", "expert": "c", "head": head}]
    text = {"tasks": tasks, "shared_labels": [["a/LABEL_0", "c/one"]]}
    (tmp_path / "more" / "more.yaml").write_text(yaml.safe_dump(text))
    done = run("add", part, tmp_path / "more" / "more.yaml")
    assert done.exit_code == 0, done.output
    bundle = Bundle(part)
    assert [t.labels for t in bundle.tasks[2:]] == [tuple(labels), ("no", "yes")]
    assert bundle.recipe.shared_labels == [["a/LABEL_0", "c/one"]]
