"""A merge that is killed, hindered or disturbed: what it leaves behind, and how it goes on."""

import errno
import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import massmerge.bundle.parts
import massmerge.merging.write
from commands import mass, start_mass
from massmerge import Bundle, InputError, MassError, merge
from massmerge.checkpoints.experts import FullExpert
from massmerge.cli.main import main
from massmerge.merging.run import Silent
from models import FAMILIES, contents, write_family, write_recipe

_random = random.Random(7)
# Spread over the whole run, the assembling and the publishing included; where in each part is drawn.
KILL_SHARES = [round((i + _random.random()) / 6, 3) for i in range(6)]
KILL_DELAYS = [round(_random.random(), 3) for _ in range(4)]


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    write_family(folder, "bert", {"red": 2, "green": 3, "blue": 2}, router={"first_pass": "fixed"})
    return folder


class Undisturbed:
    """A run that nobody kills: what it writes, how it touches its work folder, how long it takes."""

    def __init__(self, recipe: Path, out: Path) -> None:
        mass("merge", recipe, out.parent / "warm")  # the first run imports what the server has not
        began = time.perf_counter()
        code, self.touches = mass("merge", recipe, out, "--workers", 1)
        self.seconds = time.perf_counter() - began
        assert code == 0
        self.files = contents(out)


@pytest.fixture(scope="module")
def undisturbed(family, tmp_path_factory) -> Undisturbed:
    return Undisturbed(family / "recipe.yaml", tmp_path_factory.mktemp("undisturbed") / "out")


def assert_absent_or_complete(out: Path, files: dict[str, bytes]) -> None:
    assert not out.exists() or contents(out) == files


def kill_and_resume(recipe: Path, out: Path, undisturbed: Undisturbed, kill_at: int) -> dict[str, bytes]:
    """What a merge has written that was killed at a step and run again; it leaves no half bundle, and nothing beside."""
    assert mass("merge", recipe, out, "--workers", 1, kill_at=kill_at)[0] == -9
    assert_absent_or_complete(out, undisturbed.files)
    assert mass("merge", recipe, out)[0] == 0
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    return contents(out)


@pytest.mark.parametrize("share", KILL_SHARES)
def test_killed_at_any_step_it_leaves_no_half_bundle_and_ends_in_the_same_bytes(family, undisturbed, tmp_path, share):
    step, out = int(share * len(undisturbed.touches)), tmp_path / "out"
    assert kill_and_resume(family / "recipe.yaml", out, undisturbed, step) == undisturbed.files


def test_killed_at_every_kind_of_step_it_leaves_no_half_bundle_and_ends_in_the_same_bytes(
    family, undisturbed, tmp_path
):
    kinds: dict[str, list[int]] = {}
    for number, touch in enumerate(undisturbed.touches):
        if not touch.startswith(("open", "os.mkdir")):  # a read changes nothing, and an empty folder little
            kind = re.sub(
                r"[0-9a-f]{32}|\d+|red|green|blue|(?<=os.remove ).*|(?<=os.rmdir ).*|(?<=write /result/).*(?=json)",
                "…",
                touch,
            )
            kinds.setdefault(kind, []).append(number)
    assert "write /parts/….draft" in kinds and "os.rename /result" in kinds
    for kind, numbers in enumerate(kinds.values()):
        out, step = tmp_path / str(kind) / "out", numbers[len(numbers) // 2]
        out.parent.mkdir()
        assert kill_and_resume(family / "recipe.yaml", out, undisturbed, step) == undisturbed.files


@pytest.mark.parametrize("share", KILL_DELAYS)
def test_killed_at_any_time_it_leaves_no_half_bundle_and_ends_in_the_same_bytes(family, undisturbed, tmp_path, share):
    out, recipe = tmp_path / "out", family / "recipe.yaml"
    process = start_mass("merge", recipe, out)
    process.join(share * undisturbed.seconds)
    process.kill()
    process.join()
    assert_absent_or_complete(out, undisturbed.files)
    assert mass("merge", recipe, out)[0] == 0
    assert contents(out) == undisturbed.files


def test_killed_again_and_again_it_still_ends_in_the_same_bytes(family, undisturbed, tmp_path):
    out, recipe = tmp_path / "out", family / "recipe.yaml"
    for share in (0.2, 0.2, 0.3):
        assert mass("merge", recipe, out, kill_at=int(share * len(undisturbed.touches)))[0] == -9
    assert mass("merge", recipe, out)[0] == 0
    assert contents(out) == undisturbed.files


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8, 0.95])
def test_killed_while_it_replaces_a_bundle_the_old_or_the_new_one_is_there_or_none(
    family, undisturbed, tmp_path, share
):
    old = merge(write_recipe(family, ["red"], name="old.yaml"), tmp_path / "out", workers=1)
    before, recipe = contents(old), family / "recipe.yaml"
    assert mass("merge", recipe, old, "--overwrite", kill_at=int(share * len(undisturbed.touches)))[0] == -9
    assert not old.exists() or contents(old) in (before, undisturbed.files)
    assert mass("merge", recipe, old, "--overwrite")[0] == 0
    assert contents(old) == undisturbed.files


class Counting(Silent):
    def __init__(self) -> None:
        self.total = self.done = 0
        self.worked: list[str] = []

    def start(self, total: int, done: int) -> None:
        self.total, self.done = total, done

    def tensor(self, name: str) -> None:
        self.worked.append(name)


def stop_after(monkeypatch, parts: int, error: Exception | None = None) -> None:
    """Let the disk fill up when that many parts are written."""
    written = []
    real = massmerge.bundle.parts.write_tensors

    def write(path, tensors):
        if len(written) == parts:
            raise error or OSError(errno.ENOSPC, "No space left on device", str(path))
        written.append(path)
        real(path, tensors)

    monkeypatch.setattr(massmerge.bundle.parts, "write_tensors", write)


def test_tensors_that_are_finished_are_not_worked_on_again(family, undisturbed, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(patched, 9)
        with pytest.raises(MassError):
            merge(family / "recipe.yaml", tmp_path / "out", workers=1)
    reads = []
    real = FullExpert.read
    monkeypatch.setattr(FullExpert, "read", lambda self, name: reads.append(name) or real(self, name))
    progress = Counting()
    merge(family / "recipe.yaml", tmp_path / "out", workers=1, progress=progress)
    assert progress.done == 9 and len(progress.worked) == progress.total - 9
    assert set(reads) == set(progress.worked)
    assert contents(tmp_path / "out") == undisturbed.files


def test_parts_of_another_recipe_are_not_used(family, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(patched, 9)
        with pytest.raises(MassError):
            merge(write_recipe(family, ["red", "green", "blue"], name="r3.yaml", rank=3), tmp_path / "out", workers=1)
    recipe = write_recipe(family, ["red", "green", "blue"], name="r4.yaml", rank=4)
    progress = Counting()
    merge(recipe, tmp_path / "out", workers=1, progress=progress)
    assert progress.done == 0
    assert contents(tmp_path / "out") == contents(merge(recipe, tmp_path / "fresh", workers=1))


def test_parts_of_an_expert_that_has_changed_since_are_not_used_even_if_its_time_and_size_have_not(
    tmp_path, monkeypatch
):
    recipe = write_family(tmp_path, "bert", {"red": 2, "green": 2})
    with monkeypatch.context() as patched:
        stop_after(patched, 9)
        with pytest.raises(MassError):
            merge(recipe, tmp_path / "out", workers=1)
    weights = tmp_path / "red" / "model.safetensors"
    before = weights.stat()
    FAMILIES["bert"].make_expert(FAMILIES["bert"].make_base(), seed=77).save_pretrained(tmp_path / "red")
    assert weights.stat().st_size == before.st_size
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    merge(recipe, tmp_path / "out", workers=1)
    assert contents(tmp_path / "out") == contents(merge(recipe, tmp_path / "fresh", workers=1))


def run(*arguments: object):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def assert_failed(result, out: Path, *words: str) -> None:
    """Exit code 1, one message with these words, no trace, nothing that a reader accepts."""
    assert result.exit_code == 1, result.output
    assert all(word in result.stderr for word in words), result.stderr
    assert result.stderr.count("error:") == 1 and "Traceback" not in result.stderr
    with pytest.raises(InputError):
        Bundle(out)


def test_a_second_merge_to_the_same_target_is_told_to_wait(family, tmp_path):
    out, said = tmp_path / "out", []

    class Meanwhile(Silent):
        def phase(self, name: str) -> None:
            said.append(run("merge", family / "recipe.yaml", out))

    merge(family / "recipe.yaml", out, workers=1, progress=Meanwhile())
    assert said[0].exit_code == 1 and "another command is writing it. Wait for it" in said[0].stderr
    assert Bundle(out).damage() == []


def test_a_disk_that_fills_up_among_the_tensors_is_named_and_the_merge_goes_on_later(
    family, undisturbed, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        stop_after(patched, 5)
        result = run("merge", family / "recipe.yaml", out, "-q")
    assert_failed(result, out, "the disk is full", "Free some space and run the same command to resume")
    assert run("merge", family / "recipe.yaml", out, "-q").exit_code == 0
    assert contents(out) == undisturbed.files


def test_a_disk_that_fills_up_while_the_bundle_is_written_is_named(family, undisturbed, tmp_path, monkeypatch):
    def full(path, infos, data):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(massmerge.merging.write, "write_stream", full)
        result = run("merge", family / "recipe.yaml", out, "-q")
    assert_failed(result, out, "the disk is full")
    assert run("merge", family / "recipe.yaml", out, "-q").exit_code == 0
    assert contents(out) == undisturbed.files


def test_a_merge_that_would_not_fit_on_the_disk_is_not_begun(family, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    result = run("merge", family / "recipe.yaml", tmp_path / "out", "-q")
    assert_failed(result, tmp_path / "out", "the merge needs", "the disk has 1,000 left")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_target_that_cannot_be_written_is_named(family, tmp_path, monkeypatch, number):
    real = Path.mkdir

    def refuse(self, *args, **kwargs):
        if tmp_path in self.parents:
            raise OSError(number, os.strerror(number), str(self))
        real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    result = run("merge", family / "recipe.yaml", tmp_path / "out", "-q")
    assert_failed(
        result, tmp_path / "out", ".out.partial: cannot be written", os.strerror(number), "Choose another target"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_target_below_a_file_is_refused_with_the_files_name(family, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = run("merge", family / "recipe.yaml", tmp_path / "file" / "out", "-q")
    assert_failed(result, tmp_path / "file" / "out", f"because {tmp_path / 'file'} is not a folder")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_expert_that_vanishes_during_the_merge_is_named_and_can_be_put_back(tmp_path, monkeypatch):
    recipe, out = write_family(tmp_path, "bert", {"red": 2, "green": 2}), tmp_path / "out"
    real = massmerge.bundle.parts.Parts.put

    def put(self, key, tensors):
        name = real(self, key, tensors)
        if (tmp_path / "green").exists():
            (tmp_path / "green").rename(tmp_path / "away")
        return name

    with monkeypatch.context() as patched:
        patched.setattr(massmerge.bundle.parts.Parts, "put", put)
        result = run("merge", recipe, out, "-q", "--workers", 1)
    assert_failed(result, out, f"{tmp_path / 'green' / 'model.safetensors'}: disappeared during the run. Restore it")
    (tmp_path / "away").rename(tmp_path / "green")
    assert run("merge", recipe, out, "-q").exit_code == 0
    assert contents(out) == contents(merge(recipe, tmp_path / "fresh", workers=1))


def test_an_expert_that_may_not_be_read_is_not_taken_for_the_target(family, tmp_path, monkeypatch):
    def refuse(self, name):
        raise PermissionError(errno.EACCES, "Permission denied", str(family / "red" / "model.safetensors"))

    monkeypatch.setattr(FullExpert, "read", refuse)
    result = run("merge", family / "recipe.yaml", tmp_path / "out", "-q")
    assert_failed(result, tmp_path / "out", "red/model.safetensors: cannot be read (Permission denied)")


def test_an_expert_that_is_cut_short_during_the_merge_leaves_nothing(family, tmp_path, monkeypatch):
    def cut(self, name):
        raise InputError("red/model.safetensors: truncated while it was being read. Download or save it again.")

    monkeypatch.setattr(FullExpert, "read", cut)
    assert run("merge", family / "recipe.yaml", tmp_path / "out", "-q").exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_the_same_merge_again_says_that_it_is_complete_and_does_nothing(family, tmp_path):
    out = merge(family / "recipe.yaml", tmp_path / "out", workers=1)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    result = run("merge", family / "recipe.yaml", out)
    assert result.exit_code == 0 and "is already complete" in result.stderr
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before


def test_the_same_merge_again_does_not_take_a_damaged_bundle_for_complete(family, tmp_path):
    out = merge(family / "recipe.yaml", tmp_path / "out", workers=1)
    (out / "README.md").write_text("mine")
    result = run("merge", family / "recipe.yaml", out)
    assert result.exit_code == 2 and "README.md: 4 bytes" in result.stderr and "--overwrite" in result.stderr


def test_another_bundle_is_not_replaced_without_being_told_to(family, tmp_path):
    out = merge(write_recipe(family, ["red"], name="one.yaml"), tmp_path / "out", workers=1)
    before = contents(out)
    result = run("merge", family / "recipe.yaml", out)
    assert result.exit_code == 2 and "Use `--overwrite` to replace it" in result.stderr
    assert contents(out) == before


def test_overwrite_replaces_a_bundle(family, undisturbed, tmp_path):
    out = merge(write_recipe(family, ["red"], name="one.yaml"), tmp_path / "out", workers=1)
    assert run("merge", family / "recipe.yaml", out, "--overwrite", "-q").exit_code == 0
    assert contents(out) == undisturbed.files
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["notes.txt", "mass.json", "base/model.safetensors"])
def test_a_folder_that_is_no_bundle_is_never_overwritten(family, tmp_path, name):
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    (tmp_path / "out" / name).write_text("mine")
    result = run("merge", family / "recipe.yaml", tmp_path / "out", "--overwrite")
    assert result.exit_code == 2 and "it is not overwritten" in result.stderr
    assert contents(tmp_path) == {f"out/{name}": b"mine"}


def test_files_that_someone_put_into_a_bundle_are_not_overwritten_with_it(family, tmp_path):
    out = merge(family / "recipe.yaml", tmp_path / "out", workers=1)
    (out / ".git").mkdir()
    (out / ".git" / "config").write_text("mine")
    result = run("merge", family / "recipe.yaml", out, "--overwrite")
    assert result.exit_code == 2 and ".git/config" in result.stderr and "move them elsewhere" in result.stderr
    assert (out / ".git" / "config").read_text() == "mine"


def test_folders_above_the_target_are_made(family, undisturbed, tmp_path):
    assert contents(merge(family / "recipe.yaml", tmp_path / "new" / "deep" / "out", workers=1)) == undisturbed.files


def test_an_empty_folder_may_be_the_target(family, undisturbed, tmp_path):
    (tmp_path / "out").mkdir()
    assert contents(merge(family / "recipe.yaml", tmp_path / "out", workers=1)) == undisturbed.files


def test_a_merge_leaves_the_number_of_threads_as_it_was(family, tmp_path):
    before = torch.get_num_threads()
    merge(family / "recipe.yaml", tmp_path / "out", workers=2)
    assert torch.get_num_threads() == before
