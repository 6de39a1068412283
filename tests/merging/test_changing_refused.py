"""Changes of a bundle that are refused, killed or disturbed: what they say, and what they leave behind."""

import shutil

import pytest
import transformers as tf

import massmerge
from changes import bundles, run, write_adapter, write_decoder
from commands import mass
from massmerge import Bundle, InputError, MassError
from massmerge.bundle.manifest import read_manifest
from massmerge.merging.run import Silent
from models import FAMILIES, contents, rewrite, write_recipe
from pairs import shifted

KILL_SHARES = (0.05, 0.5, 0.8, 0.95, 0.99)


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
        (("add", "two", "../c=c"), "is not a valid task name"),
        (("add", "two", "no.yaml"), "no such file of tasks"),
        (("add", "two", "c=other"), "not a fine-tuned version of the base"),
        (("add", "two", "c=headless"), "task c: has no head that gives labels, and the other tasks answer with labels"),
        (("add", "none", "c=c"), "none: no such folder"),
        (("add", "base", "c=c"), "not a bundle"),
        (("add", "static", "c=c"), "a average merge, which is an ordinary checkpoint, not a bundle"),
        (("add", "two", "c=c", "--out", "all"), "is a bundle made from another recipe"),
        (("add", "two", "c=c", "--out", "base"), "it is not overwritten"),
        (("remove", "two", "z"), "no task z. Choose from a, b"),
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
    shifted(FAMILIES["bert"].make_base()).save_pretrained(folder / "headless")
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
    with pytest.raises(InputError, match="c: has no language head"):
        massmerge.add(part, {"c": "c"}, folder=tmp_path)


def test_a_base_that_is_kept_by_reference_and_has_changed_is_refused(tmp_path):
    whole, _ = bundles(tmp_path, merge={"base": "by_reference"})
    rewrite(tmp_path / "base", lambda state: {name: tensor + 0.1 for name, tensor in state.items()})
    with pytest.raises(InputError, match="has changed since the merge"):
        massmerge.remove(whole, "b")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(InputError, match="is stored by reference and is not available"):
        massmerge.remove(whole, "b")
    assert [t.name for t in Bundle(whole).tasks] == ["a", "b", "c"]


@pytest.mark.parametrize("place", ["all/tasks/inside", "all/inside"])
def test_a_target_inside_of_the_bundle_is_refused(refusing, place):
    before = contents(refusing)
    with pytest.raises(InputError, match="is inside the bundle"):
        massmerge.remove(refusing / "all", "b", out=refusing / place)
    assert contents(refusing) == before


def test_who_stands_in_the_bundle_is_sent_elsewhere(refusing, monkeypatch):
    monkeypatch.chdir(refusing / "all" / "tasks")
    done = run("remove", "..", "b")
    assert done.exit_code == 2 and "the current folder is inside this bundle" in done.stderr
    assert len(Bundle(refusing / "all").tasks) == 3


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({}, "no tasks given"),
        ({"c": ""}, "c: give the name and the expert"),
        (["c=c"], "a mapping of names to experts"),
        ({"a b": "c"}, "is not a valid task name"),
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
            with pytest.raises(MassError, match="another command is writing it"):
                massmerge.remove(whole, "b")

    massmerge.remove(whole, "c", progress=Meddling(), workers=1)
    assert [t["name"] for t in read_manifest(whole)["tasks"]] == ["a", "b"]


@pytest.mark.parametrize("out", [None, "elsewhere"])
def test_a_bundle_that_changes_after_it_was_opened_is_not_changed_again(tmp_path, out):
    whole, _ = bundles(tmp_path)
    with pytest.raises(MassError, match="another command changed it during the run"):
        massmerge.remove(whole, "c", out=out and tmp_path / out, planned=lambda _: massmerge.remove(whole, "b"))
    assert [t.name for t in Bundle(whole).tasks] == ["a", "c"]
    assert not list(tmp_path.glob(".*.partial")) and not (tmp_path / "elsewhere").exists()


def test_a_bundle_that_was_moved_aside_is_no_free_place_for_another(tmp_path):
    whole, part = bundles(tmp_path)
    before = contents(whole)
    (tmp_path / ".all.partial").mkdir()
    whole.rename(tmp_path / ".all.partial" / "replaced")
    with pytest.raises(InputError, match="the command that was replacing it was interrupted"):
        massmerge.load(whole)
    with pytest.raises(InputError, match="is a bundle made from another recipe"):
        massmerge.remove(part, "a", out=whole)
    assert contents(whole) == before
