import json
import shutil
from pathlib import Path

import pytest
import xxhash

from massmerge import Bundle, InputError, merge
from massmerge.bundle.layout import MANIFEST
from massmerge.bundle.manifest import read_manifest, sign_manifest
from massmerge.io.checksums import file_sha256
from models import contents, write_family


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return merge(write_family(folder, "bert", {"red": 2, "green": 3}), folder / "out", workers=1)


@pytest.fixture
def bundle(made, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made, tmp_path / "bundle"))


def resigned(folder: Path, **changes) -> None:
    data = json.loads((folder / MANIFEST).read_text())
    sign_manifest(folder, {key: value for key, value in data.items() if key != "sha256"} | changes)


def test_the_manifest_names_every_file_with_its_size_and_checksum(made):
    files = read_manifest(made)["files"]
    assert set(files) | {MANIFEST} == set(contents(made))
    for name, entry in files.items():
        assert (entry["bytes"], entry["sha256"]) == ((made / name).stat().st_size, file_sha256(made / name))
        large = name == "base/model.safetensors" or "factors" in name
        assert entry.get("xxh128") == (xxhash.xxh128_hexdigest((made / name).read_bytes()) if large else None)


def test_a_bundle_holds_no_pickle(made):
    assert {Path(name).suffix for name in contents(made)} == {".safetensors", ".json", ".yaml", ".md"}


def test_a_bundle_tells_its_tasks_in_order_with_their_labels(made):
    tasks = Bundle(made).tasks
    assert [(t.name, t.form, len(t.labels)) for t in tasks] == [("red", "full", 2), ("green", "full", 3)]


def test_a_bundle_tells_its_recipe(made):
    recipe = Bundle(made).recipe
    assert [t.expert for t in recipe.tasks] == ["red", "green"] and recipe.merge.budget == 2.0


def test_a_copy_of_a_bundle_is_a_bundle(bundle):
    assert Bundle(bundle).damage() == []


def test_factors_of_a_tensor_that_the_task_leaves_alone_are_none(made):
    assert Bundle(made).factors("red", "no.such.weight") is None and Bundle(made).whole("red", "no.such.bias") is None


def test_what_the_manifest_does_not_name_is_not_read(bundle):
    data = read_manifest(bundle)
    resigned(bundle, files={n: e for n, e in data["files"].items() if "red/head" not in n})
    with pytest.raises(InputError, match=r"tasks/red/head/config\.json: not in the manifest"):
        _ = Bundle(bundle).headers


def test_a_task_name_in_the_manifest_cannot_lead_outside(bundle):
    tasks = read_manifest(bundle)["tasks"]
    shutil.copytree(bundle / "tasks" / "red", bundle.parent / "red")
    resigned(bundle, tasks=[{**tasks[0], "name": "../../red"}])
    with pytest.raises(InputError, match=r"'\.\./\.\./red' is not a valid task name"):
        _ = Bundle(bundle).headers


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../b", "..\\secret", "link", "folder/inside", "a\0b"]
)
def test_a_manifest_that_points_outside_is_refused(bundle, name):
    (bundle.parent / "secret").write_text("secret")
    (bundle / "link").symlink_to(bundle.parent / "secret")
    (bundle / "folder").symlink_to(bundle.parent)
    files = read_manifest(bundle)["files"]
    resigned(bundle, files=files | {name: {"bytes": 6, "sha256": "0"}})
    with pytest.raises(InputError, match="outside of the bundle"):
        Bundle(bundle)


def test_a_newer_format_is_refused_with_the_way_to_read_it(bundle):
    resigned(bundle, format_version=5, files=["of another layout"])
    with pytest.raises(
        InputError, match=r"has format version 5, this massmerge reads up to 4.*pip install -U massmerge"
    ):
        Bundle(bundle)


def test_a_manifest_with_one_changed_digit_is_refused(bundle):
    text = (bundle / MANIFEST).read_text()
    position = text.index('"ranks"') + text[text.index('"ranks"') :].index("[") + 1
    changed = text[:position] + ("1" if text[position] != "1" else "2") + text[position + 1 :]
    (bundle / MANIFEST).write_text(changed)
    with pytest.raises(InputError, match=r"mass\.json: its bytes have changed"):
        Bundle(bundle)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"files": {}}'])
def test_a_manifest_that_is_none_is_refused(bundle, text):
    (bundle / MANIFEST).write_text(text)
    with pytest.raises(InputError, match=r"mass\.json: damaged"):
        Bundle(bundle)


def test_all_damage_is_listed_at_once(bundle):
    (bundle / "README.md").unlink()
    (bundle / "recipe.yaml").write_text("base: other")
    weights = bytearray((bundle / "base/model.safetensors").read_bytes())
    weights[-1] ^= 1
    (bundle / "base/model.safetensors").write_bytes(weights)
    with pytest.raises(InputError) as caught:
        Bundle(bundle)
    assert all(
        part in str(caught.value) for part in ("README.md: missing", "recipe.yaml: 11 bytes, should be", "base/model")
    )


def test_a_folder_that_is_no_bundle_is_told_how_to_become_one(tmp_path):
    with pytest.raises(InputError, match=r"not a bundle \(no mass\.json in it\).*mass merge"):
        Bundle(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such folder"):
        Bundle(tmp_path / "nowhere")


def test_a_static_merge_is_no_bundle_and_is_loaded_with_transformers(tmp_path):
    path = merge(write_family(tmp_path, "bert", {"red": 2}, method="tsv_m"), tmp_path / "out", workers=1)
    with pytest.raises(InputError, match=r"a tsv_m merge.*AutoModel\.from_pretrained"):
        Bundle(path)


def test_a_manifest_that_cannot_be_written_leaves_the_one_before(bundle, monkeypatch):
    before = contents(bundle)
    monkeypatch.setattr(Path, "write_text", lambda self, text, **_: self.write_bytes(text.encode()[:100]) and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resigned(bundle, method="other")
    assert contents(bundle) == before


def test_factors_of_an_unknown_task_are_refused_with_those_there_are(made):
    for ask in (Bundle(made).factors, Bundle(made).whole):
        with pytest.raises(InputError, match=r"no task 'blue'\. Choose from red, green"):
            ask("blue", "x")
