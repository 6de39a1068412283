"""Links and names that others have planted: nothing is read into results from elsewhere, changed or removed there."""

import json
import shutil
from pathlib import Path

import pytest

import massmerge as mm
from attacks import resign
from massmerge import InputError
from massmerge.bundle.manifest import read_manifest
from massmerge.bundle.stored import cached_bundle
from massmerge.bundle.work_folder import WorkFolder
from massmerge.checkpoints import find_source
from massmerge.errors import DamageError, MassError
from massmerge.io.durable import sync_tree
from massmerge.io.remote_cache import fetched
from models import contents, family_bundle, write_family
from remote import flaky, upload  # noqa: F401

EMPTY = {"bytes": 2, "sha256": "0" * 64}


@pytest.fixture
def bundle(root, tmp_path) -> Path:
    """A copy of a bundle to spoil."""
    return Path(shutil.copytree(family_bundle(root, "bert"), tmp_path / "bundle"))


@pytest.fixture
def victim(tmp_path) -> Path:
    """A folder of somebody, with names that a work folder has too."""
    folder = tmp_path / "victim"
    for name in ("result/mine", "parts/mine", "base/config.json", "fingerprint", "notes"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    return folder


# Names in manifests


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("C:/x.json", "should match pattern"),
        ("base/config.json:x.json", "should match pattern"),
        ("a\x1b[2J.json", "should match pattern"),
        ("\ud800.json", "outside of the bundle"),
        ("base/CONFIG.json", "two files at one place"),
        ("base/./config.json", "two files at one place"),
        ("base/config.json/x.json", "two files at one place"),
        ("MASS.json", "two files at one place"),
        ("base/../../x.json", "outside of the bundle"),
        ("/x.json", "outside of the bundle"),
        ("a\\..\\x.json", "outside of the bundle"),
    ],
)
def test_names_that_are_other_places_on_some_system_are_refused(bundle, name, words):
    manifest = json.loads((bundle / "mass.json").read_text())
    manifest["files"][name] = EMPTY
    del manifest["sha256"]
    said = json.dumps(manifest)  # in escapes, as surrogates have no other form
    (bundle / "mass.json").write_text(said[:-1] + f', "sha256": "{_sha256(manifest)}"}}')
    with pytest.raises(InputError, match=words) as caught:
        read_manifest(bundle)
    assert "\x1b" not in str(caught.value)


def _sha256(manifest: dict) -> str:
    from massmerge.bundle.manifest import _manifest_sha256

    return _manifest_sha256(manifest)


def test_a_linked_folder_that_the_manifest_does_not_name_is_refused(bundle, victim):
    (bundle / "base" / "more").symlink_to(victim)
    with pytest.raises(DamageError, match="base/more: not in the manifest"):
        mm.load(bundle)


# Sources


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "chat_template.jinja", "generation_config.json"])
def test_a_link_out_of_a_base_gets_into_no_bundle(tmp_path, victim, name):
    recipe = write_family(tmp_path, "bert", {"a": 2})
    (tmp_path / "base" / name).symlink_to(victim / "notes")
    with pytest.raises(InputError, match=f"{name}: is a link to a file outside"):
        mm.merge(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_within_a_source_and_to_the_whole_of_it_are_followed(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "real.json").write_text("{}")
    (tmp_path / "base" / "config.json").symlink_to("real.json")
    (tmp_path / "link").symlink_to(tmp_path / "base")
    assert find_source("link", tmp_path, download=False).json("config.json") == {}


# Work folders


@pytest.mark.parametrize("name", ["", "fingerprint", "parts", "result", "replaced"])
def test_a_work_folder_that_is_a_link_or_holds_one_is_not_worked_in(tmp_path, victim, name):
    before, recipe = contents(victim), write_family(tmp_path, "bert", {"a": 2})
    planted = tmp_path / ".out.partial" / name
    planted.parent.mkdir(exist_ok=True)
    planted.symlink_to(victim / "notes" if name == "fingerprint" else victim)
    with pytest.raises(MassError, match="is a link"):
        mm.merge(recipe, tmp_path / "out")
    assert contents(victim) == before


def test_so_it_is_with_the_work_folder_of_an_export(tmp_path, victim):
    before, work = contents(victim), WorkFolder(tmp_path / "out", "export")
    work.path.symlink_to(victim)
    with pytest.raises(MassError, match="is a link"), work.held():
        pass
    assert contents(victim) == before


# The cache of addresses


@pytest.fixture
def cached(bundle, flaky, tmp_path) -> Path:  # noqa: F811
    """Where the cache will keep the bundle at `flaky://bucket/bundle`."""
    upload(bundle, "flaky://bucket/bundle")
    folder = tmp_path / "cache" / "bundles" / json.loads((bundle / "mass.json").read_text())["sha256"]
    folder.parent.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("below", ["", "base"])
def test_nothing_is_written_through_links_in_the_cache(cached, victim, below):
    before = contents(victim)
    (cached / below).parent.mkdir(exist_ok=True)
    (cached / below).symlink_to(victim / below)
    with pytest.raises(InputError, match="behind, a link"):
        cached_bundle("flaky://bucket/bundle")
    assert contents(victim) == before


def test_another_bundle_under_the_checksum_that_is_asked_for_is_refused(cached, bundle):
    shutil.copytree(bundle, cached)
    resign(cached, fingerprint="another")
    with pytest.raises(DamageError, match="another bundle than its name says"):
        cached_bundle("flaky://bucket/bundle")


def test_a_fetched_file_is_not_written_through_a_link(flaky, tmp_path, victim):  # noqa: F811
    upload(victim, "flaky://bucket")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "files").symlink_to(victim)
    with pytest.raises(InputError, match="behind, a link"):
        fetched("flaky://bucket/notes")


# Folders that are replaced


def test_links_in_a_bundle_are_somebody_s_files_and_are_not_replaced(bundle, victim):
    (bundle / "link").symlink_to(victim)
    with pytest.raises(InputError, match=r"not part of the bundle; move them elsewhere:\s+link"):
        mm.remove(bundle, "a")
    assert (bundle / "link").is_symlink()


def test_a_link_that_leads_nowhere_is_no_matter_for_a_folder_that_is_brought_to_the_disk(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    sync_tree(tmp_path)
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "nothing").exists()
