"""Files that change while a command reads them: it refuses to mix, says which file it was, and keeps what is still right."""

import os
import shutil
from pathlib import Path

import pytest

import massmerge
from changes import bundles
from massmerge import InputError, MassError, merge
from massmerge.checkpoints.experts import FullExpert
from massmerge.merging.run import Silent
from massmerge.model.calibrate import calibrate
from massmerge.model.export import export_bundle
from massmerge.model.model import Model
from models import FAMILIES, contents, text_bundle, write_family

TEXTS = {"spam": ["win a free prize"], "topic": ["the team won"], "mood": ["so sad"]}


def other_bytes(path: Path) -> bytes:
    """As many other bytes: every number of every tensor differs a little."""
    data = bytearray(path.read_bytes())
    for at in range(8 + int.from_bytes(data[:8], "little"), len(data), 4):
        data[at] ^= 0x55
    return bytes(data)


def overwrite(path: Path, data: bytes) -> None:
    """Write a file in place and give it its times back, as some tools do."""
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class After(Silent):
    """Does something once, when that many tensors are done, and counts them."""

    def __init__(self, tensors: int = -1, action=lambda: None) -> None:
        self.tensors, self.action, self.worked, self.found = tensors, action, 0, 0

    def start(self, total: int, done: int) -> None:
        self.found = done

    def tensor(self, name: str) -> None:
        self.worked += 1
        if self.worked == self.tensors:
            self.action()


@pytest.fixture
def recipe(tmp_path) -> Path:
    return write_family(tmp_path, "bert", {"red": 2, "green": 2})


def test_an_expert_that_changes_during_the_merge_is_named_and_nothing_is_written(recipe, tmp_path):
    weights = tmp_path / "green" / "model.safetensors"
    changing = After(5, lambda: overwrite(weights, other_bytes(weights)))
    with pytest.raises(
        MassError, match=rf"task green: {weights} changed while it was being read\. Nothing was written"
    ):
        merge(recipe, tmp_path / "out", workers=1, progress=changing)
    assert not (tmp_path / "out").exists()


def test_with_the_old_expert_put_back_the_merge_goes_on_and_with_the_new_one_it_starts_anew(recipe, tmp_path):
    fresh = {}
    weights = tmp_path / "red" / "model.safetensors"
    old, new = weights.read_bytes(), other_bytes(weights)
    for name, data in (("new", new), ("old", old)):
        weights.write_bytes(data)
        fresh[name] = contents(merge(recipe, tmp_path / f"fresh-{name}", workers=1))
    assert fresh["old"] != fresh["new"]
    for name, data, kept in (("old", old, 5), ("new", new, 0)):
        weights.write_bytes(old)
        out = tmp_path / f"out-{name}"
        with pytest.raises(MassError, match="task red"):
            merge(recipe, out, workers=1, progress=After(5, lambda: overwrite(weights, new)))
        weights.write_bytes(data)
        progress = After()
        merge(recipe, out, workers=1, progress=progress)
        assert progress.found == kept
        assert contents(out) == fresh[name]


def test_an_expert_that_is_another_one_for_a_moment_leaves_no_trace(recipe, tmp_path, monkeypatch):
    wanted = contents(merge(recipe, tmp_path / "fresh", workers=1))
    weights = tmp_path / "red" / "model.safetensors"
    old, new, seen = weights.read_bytes(), other_bytes(weights), []
    real = FullExpert.read

    def read(self, name):
        if self.source.path == weights.parent and name not in seen:
            seen.append(name)
            overwrite(weights, new)
            found = real(self, name)
            overwrite(weights, old)
            return found
        return real(self, name)

    monkeypatch.setattr(FullExpert, "read", read)
    merge(recipe, tmp_path / "out", workers=1)
    assert len(seen) > 5
    assert contents(tmp_path / "out") == wanted


def test_an_expert_that_is_only_touched_does_not_stop_the_merge(recipe, tmp_path):
    wanted = contents(merge(recipe, tmp_path / "fresh", workers=1))
    merge(recipe, tmp_path / "out", workers=1, progress=After(4, (tmp_path / "red" / "model.safetensors").touch))
    assert contents(tmp_path / "out") == wanted


def test_an_expert_that_is_cut_short_during_the_merge_is_named_and_can_be_put_back(recipe, tmp_path):
    weights = tmp_path / "red" / "model.safetensors"
    whole = weights.read_bytes()
    with pytest.raises(MassError, match=rf"task red: {weights} changed") as caught:
        merge(recipe, tmp_path / "out", workers=1, progress=After(5, lambda: weights.write_bytes(whole[:9000])))
    assert not isinstance(caught.value, InputError)
    weights.write_bytes(whole)
    progress = After()
    merge(recipe, tmp_path / "out", workers=1, progress=progress)
    assert progress.found == 5


def test_an_expert_that_changes_between_plan_and_work_is_refused(recipe, tmp_path):
    weights = tmp_path / "red" / "model.safetensors"
    with pytest.raises(MassError, match=rf"{weights}: changed while it was being opened"):
        merge(recipe, tmp_path / "out", planned=lambda _: overwrite(weights, other_bytes(weights)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["base/model.safetensors", "base/config.json", "red/config.json"])
def test_whatever_changes_while_the_bundle_is_put_together_is_refused(recipe, tmp_path, place):
    class Writing(Silent):
        def phase(self, name: str) -> None:
            path = tmp_path / place
            overwrite(path, other_bytes(path) if path.suffix == ".safetensors" else path.read_bytes() + b"\n")

    with pytest.raises(MassError, match=rf"{place} changed while it was being read"):
        merge(recipe, tmp_path / "out", workers=1, progress=Writing())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["ties", "average"])
def test_a_static_merge_refuses_to_mix_too(tmp_path, method):
    recipe = write_family(tmp_path, "bert", {"red": 2, "green": 2}, method=method)
    weights = tmp_path / "green" / "model.safetensors"
    changing = After(3, lambda: overwrite(weights, other_bytes(weights)))
    with pytest.raises(MassError, match=r"task green: .* changed while it was being read"):
        merge(recipe, tmp_path / "out", workers=1, progress=changing)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "place", ["two/tasks/a/factors.safetensors", "two/base/model.safetensors", "c/model.safetensors"]
)
def test_adding_refuses_to_mix_too(tmp_path, place):
    _, part = bundles(tmp_path)
    before, path = contents(part), tmp_path / place
    changing = After(5, lambda: overwrite(path, other_bytes(path)))
    with pytest.raises(MassError, match=rf"{place} changed while it was being read"):
        massmerge.add(part, {"c": tmp_path / "c"}, workers=1, progress=changing)
    changed = place.removeprefix("two/")
    assert {k: v for k, v in contents(part).items() if k != changed} == {
        k: v for k, v in before.items() if k != changed
    }


@pytest.fixture
def bundle(root, tmp_path) -> Path:
    shutil.copytree(text_bundle(root), tmp_path / "bundle")
    return tmp_path / "bundle"


def test_an_export_refuses_a_bundle_that_changes_meanwhile(bundle, tmp_path):
    path = bundle / "tasks/mood/factors.safetensors"

    def progress(name: str) -> None:
        if name == "mood":
            overwrite(path, other_bytes(path))

    with pytest.raises(MassError, match=r"the bundle: .*tasks/mood/factors\.safetensors changed"):
        export_bundle(bundle, tmp_path / "out", "peft", progress=progress)
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_a_calibration_refuses_a_bundle_that_changes_meanwhile(bundle, tmp_path, monkeypatch):
    path, real = bundle / "tasks/mood/factors.safetensors", Model.activations

    def activations(self, *arguments, **options):
        overwrite(path, other_bytes(path))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Model, "activations", activations)
    with pytest.raises(MassError, match=r"the bundle: .*tasks/mood/factors\.safetensors changed"):
        calibrate(bundle, TEXTS)
    assert not (bundle / "router.safetensors").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


# What an earlier run has kept


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    overwrite(path, bytes(data))


def test_a_part_whose_bytes_have_changed_is_made_again_and_said(recipe, tmp_path):
    wanted = contents(merge(recipe, tmp_path / "fresh", workers=1))

    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    with pytest.raises(Stop):
        merge(recipe, tmp_path / "out", workers=1, progress=After(6, stop))
    parts = sorted((tmp_path / ".out.partial" / "parts").glob("*.safetensors"))
    assert len(parts) >= 6  # the worker may be one further
    flip(parts[2])
    parts[3].write_bytes(b"")

    class Hearing(After):
        def warning(self, problem):
            said.append(str(problem))

    said: list[str] = []
    progress = Hearing()
    merge(recipe, tmp_path / "out", workers=1, progress=progress)
    assert progress.found == len(parts) - 2
    assert len([line for line in said if line.endswith("its saved part is damaged; it is computed again.")]) == 2
    assert contents(tmp_path / "out") == wanted


def test_a_part_of_another_merge_is_not_taken_even_where_the_mark_says_so(recipe, tmp_path):
    def stop() -> None:
        raise KeyError

    for name in ("one", "two"):
        with pytest.raises(KeyError):
            merge(recipe, tmp_path / "out", workers=1, progress=After(4, stop))
        if name == "one":
            (tmp_path / ".out.partial" / "parts").rename(tmp_path / "kept")
            FAMILIES["bert"].make_expert(FAMILIES["bert"].make_base(), seed=77).save_pretrained(tmp_path / "red")
    shutil.rmtree(tmp_path / ".out.partial" / "parts")
    (tmp_path / "kept").rename(tmp_path / ".out.partial" / "parts")
    progress = After()
    merge(recipe, tmp_path / "out", workers=1, progress=progress)
    assert progress.found == 0
    assert contents(tmp_path / "out") == contents(merge(recipe, tmp_path / "fresh", workers=1))
