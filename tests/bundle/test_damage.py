"""Files of a bundle that are damaged before it is loaded, or change while it answers."""

import os
import shutil
import time

import pytest

import massmerge
from massmerge import InputError
from massmerge.bundle import damage
from massmerge.bundle.manifest import read_manifest, sign_manifest
from massmerge.io.background import end_background
from models import FAMILIES, family_bundle, rows_of, text_bundle

ROWS = rows_of(FAMILIES["bert"].make_inputs(3))
FACTORS = "tasks/b/factors.safetensors"
BASE = "base/model.safetensors"


@pytest.fixture
def bundle(root, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(family_bundle(root, "bert"), tmp_path / "bundle")


def flip(path, at: int) -> None:
    """Change one bit of a file in its place, which keeps its size."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def answers(model):
    return pytest.approx([p.logit for p in model.predict(ROWS)], abs=1e-5)


def slowly(function):
    """The same after a while, in which an answer that does not wait is long given."""

    def slow(file):
        time.sleep(0.5)
        return function(file)

    return slow


# When it is loaded


def test_no_answer_is_given_from_a_bundle_with_one_changed_bit_in_any_file(root, tmp_path):
    source = text_bundle(root)
    for number, name in enumerate(read_manifest(source)["files"]):
        broken = shutil.copytree(source, tmp_path / f"{number}")
        flip(broken / name, (broken / name).stat().st_size // 2)
        with pytest.raises(InputError, match=f"{name}: its bytes have changed"):
            massmerge.load(broken).predict("a text")


def test_the_first_answer_waits_until_the_large_files_have_been_compared(bundle, monkeypatch):
    monkeypatch.setattr(damage, "xxh128_of", slowly(damage.xxh128_of))
    flip(bundle / FACTORS, -3 + (bundle / FACTORS).stat().st_size)
    model = massmerge.load(bundle)  # which does not wait
    with pytest.raises(InputError, match=r"tasks/b/factors.*XXH128 differs"):
        model.predict(ROWS)


def test_a_damaged_header_is_told_as_damage_whatever_loading_makes_of_it(bundle):
    flip(bundle / FACTORS, 12)
    with pytest.raises(InputError, match=r"damaged:\s+tasks/b/factors"):
        massmerge.load(bundle)


def test_a_bundle_of_before_the_quick_checksums_is_compared_by_the_others(bundle):
    manifest = read_manifest(bundle)
    for entry in manifest["files"].values():
        entry.pop("xxh128", None)
    sign_manifest(bundle, manifest)
    massmerge.load(bundle).predict(ROWS)
    flip(bundle / BASE, -3 + (bundle / BASE).stat().st_size)
    with pytest.raises(InputError, match=r"base/model.*SHA-256 differs"):
        massmerge.load(bundle).predict(ROWS)


def test_what_only_sha_256_finds_is_found_in_the_background(bundle, monkeypatch):
    flip(bundle / FACTORS, -3 + (bundle / FACTORS).stat().st_size)
    said = {name: entry.get("xxh128") for name, entry in read_manifest(bundle)["files"].items()}
    monkeypatch.setattr(damage, "xxh128_of", lambda file: said[os.path.relpath(file.name, bundle)])
    model = massmerge.load(bundle)
    for call in (lambda: model.core.watch.refuse_damage(wait=True), lambda: model.embed(ROWS)):
        with pytest.raises(InputError, match="SHA-256 differs"):
            call()


def test_a_check_that_fails_by_itself_trusts_nothing(bundle, monkeypatch):
    def broken(file):
        raise OSError("the disk is gone")

    monkeypatch.setattr(damage, "xxh128_of", broken)
    with pytest.raises(InputError, match="the disk is gone"):
        massmerge.load(bundle).predict(ROWS)


# While it answers


@pytest.mark.parametrize("check", [True, "background"])
@pytest.mark.parametrize("name", [FACTORS, BASE])
def test_a_file_that_is_cut_short_or_overwritten_is_noticed_before_the_next_answer(root, tmp_path, name, check):
    for number, spoil in enumerate(
        (lambda path: os.truncate(path, 100), lambda path: path.write_bytes(bytes(path.stat().st_size)))
    ):
        bundle = shutil.copytree(family_bundle(root, "bert"), tmp_path / f"{number}")
        model = massmerge.load(bundle, check=check)
        model.predict(ROWS)
        spoil(bundle / name)
        for call in (model.predict, model.embed, model.route):
            with pytest.raises(InputError, match=f"{name}: changed while it was in use"):
                call(ROWS)


def test_what_was_computed_while_a_file_changed_is_no_answer(bundle, monkeypatch):
    model = massmerge.load(bundle)
    run = type(model.sets.second_pass).__call__

    def meanwhile(self, *args):
        flip(bundle / FACTORS, -3 + (bundle / FACTORS).stat().st_size)
        return run(self, *args)

    monkeypatch.setattr(type(model.sets.second_pass), "__call__", meanwhile)
    for call in (lambda: next(model.stream(ROWS)), lambda: model.embed(ROWS)):
        with pytest.raises(InputError, match="changed while it was in use"):
            call()


def test_a_bundle_that_is_replaced_or_removed_goes_on_answering(bundle):
    model = massmerge.load(bundle)
    expected = [p.logit for p in model.predict(ROWS)]
    bundle.rename(bundle.with_name("old"))
    assert answers(model) == expected
    shutil.rmtree(bundle.with_name("old"))
    assert answers(model) == expected


def test_what_is_read_into_memory_does_not_need_its_files(root, tmp_path):
    for family in ("bert", "vit"):
        bundle = shutil.copytree(family_bundle(root, family), tmp_path / family)
        rows = rows_of(FAMILIES[family].make_inputs(3))
        expected = massmerge.load(bundle).predict(rows)
        model = massmerge.load(bundle, mapped=False)
        for path in [p for p in bundle.rglob("*") if p.is_file()]:
            os.truncate(path, 0)
        for task in (None, *model.tasks):
            assert model.predict(rows, task=task)
        assert [p.logit for p in model.predict(rows)] == pytest.approx([p.logit for p in expected], abs=1e-5)


def test_a_bundle_that_is_replaced_while_it_is_loaded_is_refused(bundle, monkeypatch):
    from massmerge.model import load as runtime

    load = runtime._load

    def meanwhile(*args, **options):
        found = load(*args, **options)
        draft = bundle / "draft"
        shutil.copy(bundle / FACTORS, draft)
        draft.replace(bundle / FACTORS)
        return found

    monkeypatch.setattr(runtime, "_load", meanwhile)
    with pytest.raises(InputError, match="replaced while the bundle was loaded"):
        massmerge.load(bundle)


def test_the_slow_comparison_ends_when_the_process_does(root, monkeypatch):
    monkeypatch.setattr(damage, "_HEAD_START", 60.0)
    model = massmerge.load(text_bundle(root), check="background")
    thread = model.core.watch._thread
    assert thread.is_alive()
    end_background([thread])
    assert not thread.is_alive()
