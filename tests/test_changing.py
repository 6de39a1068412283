"""Tasks added to a bundle and removed from it, without the experts of the others."""

import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers as tf
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import massmerge
from commands import mass
from massmerge import Bundle, InputError, MassError
from massmerge.bundle import read_manifest
from massmerge.calibration import calibrate
from massmerge.cli.main import main
from massmerge.merging import Silent
from massmerge.verification import verify_bundle
from models import FAMILIES, contents, rewrite, rows_of, text_bundle, write_family, write_recipe
from pairs import shifted

TASKS = {"a": 2, "b": 3, "c": 4}
KILL_SHARES = (0.05, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)


def bundles(folder: Path, family: str = "bert", **sections) -> tuple[Path, Path]:
    """A bundle of the tasks a, b and c, and one of a and b alone; the recipes' folder is theirs."""
    write_family(folder, family, TASKS)
    for name, tasks in (("all", "abc"), ("two", "ab")):
        recipe = write_recipe(folder, list(tasks), name=f"{name}.yaml")
        recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), **sections}, sort_keys=False))
        massmerge.merge(recipe, folder / name)
    return folder / "all", folder / "two"


def write_adapter(folder: Path, task: str, kind: type, seed: int = 0, **options) -> None:
    """A LoRA adapter over the base in a folder, with updates of its own."""
    model = kind.from_pretrained(folder / "base")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    wrapped.save_pretrained(folder / task)


def write_decoder(folder: Path) -> tf.LlamaForCausalLM:
    """A decoder whose output layer is its own, as the base of a folder."""
    torch.manual_seed(3)
    base = tf.LlamaForCausalLM(FAMILIES["llama"].make_config()).eval()
    base.save_pretrained(folder / "base")
    return base


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def assert_close(found: Path, wanted: Path, *, rounding: float = 1e-4) -> None:
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
        {"merge": {"rank": "1/T"}},
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


def test_what_an_expert_in_half_precision_left_alone_stays_alone(tmp_path):
    """A base in half precision: factors are kept in it, and cutting them rounds nothing anew."""
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


def test_shared_labels_of_a_removed_task_go_with_it(tmp_path):
    groups = [["a/LABEL_0", "b/LABEL_0"], ["a/LABEL_1", "b/LABEL_1", "c/LABEL_1"]]
    write_family(tmp_path, "bert", TASKS)
    recipe = write_recipe(tmp_path, list("abc"))
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "shared_labels": groups}))
    out = massmerge.merge(recipe, tmp_path / "out")
    massmerge.remove(out, "b")
    assert Bundle(out).recipe.shared_labels == [["a/LABEL_1", "c/LABEL_1"]]


def test_labels_that_were_shared_through_a_removed_task_stay_shared(tmp_path):
    groups = [["a/LABEL_0", "b/LABEL_0"], ["c/LABEL_1", "a/LABEL_0"]]
    write_family(tmp_path, "bert", TASKS)
    recipe = write_recipe(tmp_path, list("abc"))
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "shared_labels": groups}))
    out = massmerge.merge(recipe, tmp_path / "out")
    massmerge.remove(out, "a")
    assert Bundle(out).recipe.shared_labels == [["b/LABEL_0", "c/LABEL_1"]]


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


def test_a_fitted_router_is_left_out_with_a_warning(root, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(text_bundle(root), out)
    calibrate(out, {"spam": ["win now"], "topic": ["the match"], "mood": ["so sad"]})
    done = run("remove", out, "mood")
    assert done.exit_code == 0, done.output
    assert "prototype router was fitted" in done.stderr and "mass calibrate" in done.stderr
    assert "router.safetensors" not in contents(out)
    assert massmerge.load(out).predict("so sad")[0].task in ("spam", "topic")


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


# What cannot be done is said, and nothing is written


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "two", "a=c"), "has a already"),
        (("add", "two", "A=c"), "has a already"),
        (("add", "two", "c=nowhere/at/all"), "nowhere/at/all: no such file or folder"),
        (("add", "two", "c"), "write TASK=EXPERT"),
        (("add", "two", "c="), "write TASK=EXPERT"),
        (("add", "two", "c=c", "c=c"), "two tasks are called 'c'"),
        (("add", "two", "../c=c"), "is no folder name"),
        (("add", "two", "no.yaml"), "no such file of tasks"),
        (("add", "two", "c=other"), "not a fine-tuned version of the base"),
        (("add", "none", "c=c"), "none: no such folder"),
        (("add", "base", "c=c"), "not a bundle"),
        (("add", "static", "c=c"), "a average merge, which is an ordinary checkpoint and no bundle"),
        (("add", "two", "c=c", "--out", "all"), "is a bundle of another recipe"),
        (("add", "two", "c=c", "--out", "base"), "it is never overwritten"),
        (("remove", "two", "z"), "no task z. There are a, b"),
        (("remove", "two", "a", "b"), "no task would be left"),
        (("remove", "none", "a"), "none: no such folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_is_wrong_is_named_and_nothing_is_written(refusing, monkeypatch, arguments, words):
    monkeypatch.chdir(refusing)
    before = contents(refusing)
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert contents(refusing) == before


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusing")
    bundles(folder)
    massmerge.merge(write_recipe(folder, ["a", "b"], method="average"), folder / "static")
    wide = FAMILIES["bert"]
    wide.expert(wide.make_config(hidden_size=48)).save_pretrained(folder / "other")
    return folder


def test_damage_is_not_carried_over(tmp_path):
    whole, _ = bundles(tmp_path)
    path = whole / "tasks/a/factors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        massmerge.remove(whole, "b")


def test_files_that_are_not_the_bundles_are_not_thrown_away(tmp_path):
    whole, _ = bundles(tmp_path)
    (whole / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"notes\.txt"):
        massmerge.remove(whole, "b")
    assert (whole / "notes.txt").read_text() == "mine"


def test_an_expert_of_numbers_that_are_none_leaves_the_bundle_as_it_was(tmp_path):
    _, part = bundles(tmp_path)
    rewrite(tmp_path / "c", lambda state: {**state, "bert.pooler.dense.weight": state["bert.pooler.dense.weight"] / 0})
    before = contents(part)
    with pytest.raises(InputError, match="NaN or infinity"):
        massmerge.add(part, {"c": "c"}, folder=tmp_path)
    assert contents(part) == before
    assert not list(tmp_path.glob(".*.partial"))


def test_an_adapter_without_the_language_head_that_the_bundle_lacks_is_refused(tmp_path):
    base = write_decoder(tmp_path)
    write_adapter(tmp_path, "c", tf.LlamaForCausalLM, target_modules=["q_proj"], task_type="CAUSAL_LM")
    for seed, task in enumerate("ab"):
        shifted(base, seed).save_pretrained(tmp_path / task)
    part = massmerge.merge(write_recipe(tmp_path, ["a", "b"]), tmp_path / "part")
    with pytest.raises(InputError, match="c: has no language head of its own"):
        massmerge.add(part, {"c": "c"}, folder=tmp_path)


def test_a_base_that_is_kept_by_reference_and_has_changed_is_refused(tmp_path):
    whole, _ = bundles(tmp_path, merge={"base": "by_reference"})
    rewrite(tmp_path / "base", lambda state: {name: tensor + 0.1 for name, tensor in state.items()})
    with pytest.raises(InputError, match="has changed since the merge"):
        massmerge.remove(whole, "b")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(InputError, match="is kept by reference, and is not to be had"):
        massmerge.remove(whole, "b")
    assert [t.name for t in Bundle(whole).tasks] == ["a", "b", "c"]


@pytest.mark.parametrize("place", ["all/tasks/inside", "all/inside"])
def test_a_target_inside_of_the_bundle_is_refused(refusing, place):
    before = contents(refusing)
    with pytest.raises(InputError, match="lies inside of the bundle"):
        massmerge.remove(refusing / "all", "b", out=refusing / place)
    assert contents(refusing) == before


def test_who_stands_in_the_bundle_is_sent_elsewhere(refusing, monkeypatch):
    monkeypatch.chdir(refusing / "all" / "tasks")
    done = run("remove", "..", "b")
    assert done.exit_code == 2 and "you stand in it" in done.stderr
    assert len(Bundle(refusing / "all").tasks) == 3


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({}, "no task to add is named"),
        ({"c": ""}, "c: give the name and the expert"),
        (["c=c"], "a mapping of names to experts"),
        ({"a b": "c"}, "is no folder name"),
    ],
    ids=["none", "no expert", "a list", "a name"],
)
def test_wrong_kinds_of_tasks_are_told(refusing, tasks, words):
    with pytest.raises(InputError, match=words):
        massmerge.add(refusing / "two", tasks)


# Killed on the way


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """A folder with a bundle of two tasks, what `mass add` makes of it, and how it touches its work folder."""
    folder = tmp_path_factory.mktemp("killed")
    _, part = bundles(folder)
    shutil.copytree(part, folder / "done")
    code, touches = mass("add", folder / "done", f"c={folder / 'c'}", "--workers", 1)
    assert code == 0
    return part, contents(folder / "done"), len(touches)


@pytest.mark.parametrize("share", KILL_SHARES)
def test_killed_at_any_step_it_leaves_one_of_the_two_bundles_or_mends_it_by_the_next_call(unchanged, tmp_path, share):
    part, wanted, touches = unchanged
    out = tmp_path / "out"
    shutil.copytree(part, out)
    command = ("add", out, f"c={part.parent / 'c'}", "--workers", 1)
    assert mass(*command, kill_at=int(share * touches))[0] == -9
    code, _ = mass(*command)
    assert code in (0, 2), "0: it was done now; 2: the task was there already"
    assert contents(out) == wanted
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_bundle_that_was_moved_aside_when_it_was_killed_comes_back(tmp_path):
    whole, _ = bundles(tmp_path)
    before = contents(whole)
    (tmp_path / ".all.partial").mkdir()
    whole.rename(tmp_path / ".all.partial" / "replaced")
    with pytest.raises(InputError, match="no task z"):
        massmerge.remove(whole, "z")
    assert contents(whole) == before


def test_two_changes_at_once_are_refused(tmp_path):
    whole, _ = bundles(tmp_path)

    class Meddling(Silent):
        """Changes the bundle while the other change is at work."""

        def start(self, total, done):
            with pytest.raises(MassError, match="another merge is writing it"):
                massmerge.remove(whole, "b")

    massmerge.remove(whole, "c", progress=Meddling(), workers=1)
    assert [t["name"] for t in read_manifest(whole)["tasks"]] == ["a", "b"]


@pytest.mark.parametrize("out", [None, "elsewhere"])
def test_a_bundle_that_changes_after_it_was_opened_is_not_changed_again(tmp_path, out):
    whole, _ = bundles(tmp_path)
    with pytest.raises(MassError, match="another command has changed it meanwhile"):
        massmerge.remove(whole, "c", out=out and tmp_path / out, planned=lambda _: massmerge.remove(whole, "b"))
    assert [t.name for t in Bundle(whole).tasks] == ["a", "c"]
    assert not list(tmp_path.glob(".*.partial")) and not (tmp_path / "elsewhere").exists()


def test_a_bundle_that_was_moved_aside_is_no_free_place_for_another(tmp_path):
    whole, part = bundles(tmp_path)
    before = contents(whole)
    (tmp_path / ".all.partial").mkdir()
    whole.rename(tmp_path / ".all.partial" / "replaced")
    with pytest.raises(InputError, match="a command that was replacing it was killed"):
        massmerge.load(whole)
    with pytest.raises(InputError, match="is a bundle of another recipe"):
        massmerge.remove(part, "a", out=whole)
    assert contents(whole) == before
