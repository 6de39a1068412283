"""What every command that writes a folder keeps to: one at a time, all or nothing, and nothing lost by a kill."""

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import massmerge
import massmerge.bundle.work_folder
import massmerge.io.durable
from changes import bundles, run
from commands import mass
from massmerge import Bundle, InputError, MassError, merge
from massmerge.bundle.manifest import read_manifest
from massmerge.bundle.merge_folder import MergeFolder, recover
from massmerge.bundle.work_folder import WorkFolder
from massmerge.io.durable import drafted, exchange, sync_tree
from massmerge.io.tensor_file import read_tensors
from massmerge.model.calibrate import calibrate
from massmerge.model.export import export_bundle
from massmerge.model.model import Model
from models import contents, text_bundle, write_family

TEXTS = {"spam": "win a free prize now", "topic": "the team won the match", "mood": "so sad and bad"}


@pytest.fixture
def bundle(root, tmp_path) -> Path:
    """A bundle of its own that may be changed."""
    shutil.copytree(text_bundle(root), tmp_path / "here" / "bundle")
    return tmp_path / "here" / "bundle"


def names_beside(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())


def kill_points(touches: list[str]) -> list[int]:
    """The first and the last step of every kind."""
    kinds: dict[str, list[int]] = {}
    for number, touch in enumerate(touches):
        kinds.setdefault(touch.partition(" ")[0], []).append(number)
    return sorted({number for numbers in kinds.values() for number in (numbers[0], numbers[-1])})


# Calibrate


@pytest.fixture
def inputs(tmp_path) -> list[str]:
    """Arguments that give every task a file of inputs."""
    for task, text in TEXTS.items():
        (tmp_path / f"{task}.txt").write_text(text + "\n")
    return [word for task in TEXTS for word in ("--inputs", f"{task}={tmp_path / task}.txt")]


def test_killed_at_any_step_calibrate_leaves_a_bundle_that_opens_and_again_mends_everything(bundle, inputs):
    whole, before = bundle.with_name("whole"), contents(bundle)
    shutil.copytree(bundle, whole)
    code, touches = mass("calibrate", whole, *inputs)
    assert code == 0
    after = contents(whole)
    shutil.rmtree(whole)
    for point in kill_points(touches):
        assert mass("calibrate", bundle, *inputs, kill_at=point)[0] == -9
        assert contents(bundle) in (before, after), touches[point]
        assert Bundle(bundle).damage() == []
        assert mass("calibrate", bundle, *inputs)[0] == 0
        assert contents(bundle) == after
        assert names_beside(bundle) == ["bundle"]
        shutil.rmtree(bundle)
        for name, data in before.items():
            (bundle / name).parent.mkdir(parents=True, exist_ok=True)
            (bundle / name).write_bytes(data)


def test_a_second_calibration_at_the_same_time_is_told_to_wait(bundle, monkeypatch):
    real, said = Model.activations, []

    def activations(self, *arguments, **options):
        if not said:
            said.append("")
            with pytest.raises(MassError, match=r"another command is writing it\. Wait for it") as caught:
                calibrate(bundle, {task: [text] for task, text in TEXTS.items()}, kind="nearest")
            said.append(str(caught.value))
            with pytest.raises(MassError, match="another command is writing it"):
                massmerge.remove(bundle, "mood")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Model, "activations", activations)
    calibrate(bundle, {task: [text] for task, text in TEXTS.items()})
    assert len(said) == 2 and Bundle(bundle).router_kind == "linear"


def test_what_an_earlier_version_left_when_it_was_killed_is_mended(bundle):
    calibrate(bundle, {task: [text] for task, text in TEXTS.items()})
    for name in (".router.safetensors.draft", ".mass.json.draft"):
        (bundle / name).write_bytes(b"half")
    massmerge.remove(bundle, "mood")
    assert [task.name for task in Bundle(bundle).tasks] == ["spam", "topic"]
    assert not list(bundle.glob(".*"))


def test_a_router_that_the_manifest_does_not_name_is_not_used(bundle):
    fitted = shutil.copytree(bundle, bundle.with_name("fitted"))
    calibrate(fitted, {task: [text] for task, text in TEXTS.items()})
    shutil.copy(fitted / "router.safetensors", bundle)  # as a killed calibration of earlier versions left it
    with pytest.raises(InputError, match="the router linear has not been fitted"):
        massmerge.load(bundle, router="linear")


def test_calibrate_leaves_other_files_of_the_folder_and_hard_links_to_it_as_they_are(bundle):
    (bundle / "notes.txt").write_text("mine")
    backup = bundle.with_name("backup")
    shutil.copytree(bundle, backup, copy_function=os.link)
    before = contents(backup)
    for kind in ("prototype", "nearest"):
        calibrate(bundle, {task: [text] for task, text in TEXTS.items()}, kind=kind)
    assert contents(backup) == before
    assert (bundle / "notes.txt").read_text() == "mine"
    shutil.rmtree(backup)
    assert {p.stat().st_nlink for p in bundle.rglob("*") if p.is_file()} == {1}


def test_calibrate_copies_where_there_are_no_hard_links(bundle, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    calibrate(bundle, {task: [text] for task, text in TEXTS.items()})
    assert Bundle(bundle).router_kind == "linear"


def test_a_calibration_that_fails_keeps_what_a_killed_merge_has_finished(bundle):
    part = bundle.with_name(".bundle.partial") / "parts" / "part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"work")
    (part.parent.parent / "fingerprint").write_text("of another merge")
    with pytest.raises(InputError, match="no inputs for"):
        calibrate(bundle, {})
    assert part.read_bytes() == b"work"


# Where folders cannot trade places


def test_two_renames_do_where_folders_cannot_trade_places(bundle, monkeypatch):
    monkeypatch.setattr(massmerge.bundle.work_folder, "exchange", lambda *_: False)
    calibrate(bundle, {task: [text] for task, text in TEXTS.items()})
    assert Bundle(bundle).router_kind == "linear" and names_beside(bundle) == ["bundle"]


def test_between_the_two_renames_a_kill_loses_nothing(bundle, inputs):
    before = contents(bundle)
    bundle.with_name(".bundle.partial").mkdir()
    bundle.rename(bundle.with_name(".bundle.partial") / "replaced")
    assert run("calibrate", bundle, *inputs, "-q").exit_code == 0
    assert {n: d for n, d in contents(bundle).items() if n in before and n != "mass.json"} == {
        n: d for n, d in before.items() if n != "mass.json"
    }
    assert names_beside(bundle) == ["bundle"]


def test_what_was_moved_aside_goes_when_what_replaces_it_is_there(bundle):
    moved = bundle.with_name(".bundle.partial") / "replaced"
    shutil.copytree(bundle, moved)
    recover(bundle)
    assert names_beside(bundle) == ["bundle"]


def test_what_was_moved_aside_stays_when_something_else_has_taken_its_place(bundle, tmp_path, monkeypatch):
    _, other = bundles(tmp_path / "others")
    moved = bundle.with_name(".bundle.partial") / "replaced"
    before = contents(bundle)
    moved.parent.mkdir()
    bundle.rename(moved)
    shutil.copytree(other, bundle)
    monkeypatch.setattr(massmerge.bundle.work_folder, "exchange", lambda *_: False)
    with pytest.raises(MassError, match="Move one of the two elsewhere"):
        massmerge.remove(bundle, "a")
    assert contents(moved) == before and contents(bundle) == contents(other)


def test_folders_trade_places_in_one_step_on_linux(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    assert exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "file").read_text() == "b" and (tmp_path / "b" / "file").read_text() == "a"
    assert not exchange(tmp_path / "a", tmp_path / "none")


# Export


def test_an_export_never_removes_a_bundle_that_a_killed_command_moved_aside(bundle, tmp_path):
    whole, _ = bundles(tmp_path / "others")
    before = contents(whole)
    moved = whole.with_name(".all.partial") / "replaced"
    moved.parent.mkdir()
    whole.rename(moved)
    with pytest.raises(InputError, match="is there already"):
        export_bundle(bundle, whole, "hf", ["spam"])
    assert contents(whole) == before


def test_an_export_leaves_the_work_of_a_killed_merge_alone(bundle, tmp_path):
    part = tmp_path / ".out.partial" / "parts" / "part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"work")
    export_bundle(bundle, tmp_path / "out", "hf", ["spam"])
    assert part.read_bytes() == b"work"


def test_a_second_export_to_the_same_target_is_told_to_wait(bundle, tmp_path):
    def meanwhile(name: str) -> None:
        with pytest.raises(MassError, match="another command is writing it"):
            export_bundle(bundle, tmp_path / "out", "hf", ["spam"])

    export_bundle(bundle, tmp_path / "out", "peft", progress=meanwhile)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["mood", "spam", "topic"]


def test_an_export_does_not_replace_what_was_put_at_its_target_meanwhile(bundle, tmp_path):
    def meanwhile(name: str) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")

    with pytest.raises(OSError, match="not empty"):
        export_bundle(bundle, tmp_path / "out", "hf", ["spam"], progress=meanwhile)
    assert contents(tmp_path / "out") == {"notes.txt": b"mine"}


def test_killed_at_any_step_an_export_is_whole_or_not_there(bundle, tmp_path):
    command = ("export", bundle, bundle.with_name("out"), "--to", "hf", "--tasks", "spam")
    code, touches = mass(*command)
    assert code == 0
    after = contents(bundle.with_name("out"))
    for point in kill_points(touches):
        shutil.rmtree(bundle.with_name("out"))
        assert mass(*command, kill_at=point)[0] == -9
        if not bundle.with_name("out").exists():
            assert mass(*command)[0] == 0
        assert contents(bundle.with_name("out")) == after, touches[point]


# A merge


def test_a_merge_does_not_replace_what_was_put_at_its_target_meanwhile(tmp_path):
    recipe = write_family(tmp_path, "bert", {"red": 2})

    class Meanwhile(massmerge.merging.run.Silent):
        def phase(self, name: str) -> None:
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "notes.txt").write_text("mine")

    with pytest.raises(MassError, match=r"something was created there during the run\. Move it elsewhere"):
        merge(recipe, tmp_path / "out", workers=1, progress=Meanwhile())
    assert contents(tmp_path / "out") == {"notes.txt": b"mine"}
    shutil.rmtree(tmp_path / "out")
    merge(recipe, tmp_path / "out", workers=1)
    assert Bundle(tmp_path / "out").damage() == []


def test_a_merge_that_fails_takes_nothing_from_one_that_came_after_it(tmp_path, monkeypatch):
    recipe = write_family(tmp_path, "bert", {"red": 2})
    monkeypatch.setattr(massmerge.merging.run, "_refuse_changed", lambda prepared, work: None)
    held = []
    real = MergeFolder.discard

    def discard(self):
        with pytest.raises(MassError, match="another command"), WorkFolder(self.target).held():
            pass
        held.append(True)
        real(self)

    def wrong(*_):
        raise InputError("wrong")

    monkeypatch.setattr(MergeFolder, "discard", discard)
    monkeypatch.setattr(massmerge.merging.run, "findings", wrong)
    with pytest.raises(InputError, match="wrong"):
        merge(recipe, tmp_path / "out", workers=1)
    assert held == [True]


def test_two_writers_of_one_part_leave_it_whole(tmp_path):
    folder = MergeFolder(tmp_path / "out", "fingerprint")
    tensors = [{"x": torch.full((200_000,), float(i))} for i in range(2)]
    with folder.opened():
        for _ in range(25):
            start = threading.Barrier(2)

            def write(i: int, start: threading.Barrier = start) -> None:
                start.wait()
                folder.parts.put("000000", tensors[i])

            with ThreadPoolExecutor(2) as pool:
                list(pool.map(write, range(2)))
            for path in (folder.path / "parts").iterdir():
                assert len(dict(read_tensors(path))["x"].unique()) == 1


# On the disk before its name


@pytest.fixture
def synced(monkeypatch) -> list[str]:
    """The paths that are brought to the disk, in order."""
    found, real = [], os.fsync

    def fsync(handle: int) -> None:
        found.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_all_files_and_folders_are_on_the_disk_before_the_result_has_its_name(tmp_path, monkeypatch, synced):
    recipe = write_family(tmp_path, "bert", {"red": 2})
    real, before = Path.rename, []

    def rename(self, target):
        if self.name == "result":
            before.extend(synced)
            assert {str(p) for p in (self, *self.rglob("*"))} <= set(synced)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    merge(recipe, tmp_path / "out", workers=1)
    assert before and str(tmp_path) in synced[len(before) :]


def test_a_file_is_on_the_disk_before_it_has_its_name_and_goes_away_if_it_fails(tmp_path, synced):
    path = tmp_path / "file"
    with drafted(path) as draft:
        draft.write_text("whole")
    assert path.read_text() == "whole" and synced == [str(draft)]
    with pytest.raises(KeyError), drafted(path) as draft:
        draft.write_text("half")
        raise KeyError
    assert contents(tmp_path) == {"file": b"whole"}


def test_systems_that_cannot_sync_a_folder_are_not_asked_to(tmp_path, monkeypatch, synced):
    (tmp_path / "file").write_text("x")
    real = os.open

    def open_file(path, *arguments):
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", open_file)
    sync_tree(tmp_path)
    assert synced == [str(tmp_path / "file")]


def test_a_bundle_is_the_same_in_its_manifest_after_all_this(bundle):
    before = read_manifest(bundle)
    calibrate(bundle, {task: [text] for task, text in TEXTS.items()})
    after = read_manifest(bundle)
    assert {k: v for k, v in after.items() if k not in ("sha256", "files", "router_kind")} == {
        k: v for k, v in before.items() if k not in ("sha256", "files")
    }
