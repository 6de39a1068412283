"""Recipes, sources, bundles and outputs at addresses give what the same files on a disk give."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import massmerge
from massmerge import merge
from massmerge.bundle.download import find_bundle, pull_bundle, refuse_hub
from massmerge.bundle.layout import MANIFEST
from massmerge.bundle.stored import published_sha256
from massmerge.bundle.upload import push_bundle
from massmerge.cli.main import main
from massmerge.errors import DamageError, InputError, MassError
from massmerge.io.remote import look_up, put, remove
from massmerge.merging import run
from massmerge.merging.open_recipe import make_plan
from models import FAMILIES, contents, text_bundle, write_family, write_recipe
from remote import FlakyFileSystem, flaky, serving, upload  # noqa: F401

TASKS = {"red": 2, "green": 3}
HOME, OUT = "flaky://bucket/work", "flaky://bucket/out"


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    """A base and two experts of it, with a recipe."""
    folder = tmp_path_factory.mktemp("bert")
    write_family(folder, "bert", TASKS)
    write_recipe(folder, list(TASKS))
    return folder


@pytest.fixture(scope="module")
def local(family, tmp_path_factory) -> Path:
    """What a merge of files on the disk gives."""
    return merge(family / "recipe.yaml", tmp_path_factory.mktemp("local") / "out", workers=1)


@pytest.fixture
def home(flaky, family) -> str:  # noqa: F811
    """The address of recipe, base and experts."""
    upload(family, HOME)
    flaky.bytes_read = flaky.asked = 0
    return HOME


def weights(folder: Path) -> dict[str, bytes]:
    """The files of a bundle that do not name its sources."""
    return {name: data for name, data in contents(folder).items() if name.endswith((".safetensors", "labels.json"))}


def test_a_plan_reads_a_small_part_of_the_files(flaky, tmp_path):  # noqa: F811
    base = FAMILIES["bert"].make_base(hidden_size=256, intermediate_size=1024)
    base.save_pretrained(tmp_path / "base")
    base.save_pretrained(tmp_path / "red")
    write_recipe(tmp_path, ["red"])
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    own = make_plan(tmp_path / "recipe.yaml")
    upload(tmp_path, HOME)
    found = make_plan(f"{HOME}/recipe.yaml")
    assert not found.errors and found.sizes.base == own.sizes.base and found.base == f"{HOME}/base"
    assert 0 < flaky.bytes_read < stored / 20


def test_a_merge_of_addresses_gives_the_same_tensors_though_every_tenth_read_fails(home, local, tmp_path, monkeypatch):
    monkeypatch.setattr(FlakyFileSystem, "throttle_every", 10)
    monkeypatch.setattr(FlakyFileSystem, "cut_every", 13)
    made = merge(f"{home}/recipe.yaml", tmp_path / "out", workers=2)
    assert weights(made) == weights(local)
    cached = {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert ".safetensors" not in cached


def test_a_source_that_is_replaced_during_a_merge_stops_it(home, family, tmp_path, monkeypatch):
    assemble = run._Run.assemble

    def replaced(self) -> None:
        assemble(self)
        put(family / "red" / "model.safetensors", f"{home}/red/model.safetensors")

    monkeypatch.setattr(run._Run, "assemble", replaced)
    with pytest.raises(MassError, match=r"task red: .*model.safetensors changed while it was being read"):
        merge(f"{home}/recipe.yaml", tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def test_a_merge_to_an_address_publishes_the_manifest_last(flaky, family, local):  # noqa: F811
    merge(family / "recipe.yaml", OUT, workers=1)
    assert flaky.puts[-1].endswith(MANIFEST) and len(flaky.puts) == len(contents(local))
    assert contents(find_bundle(OUT)) == contents(local)
    sent = len(flaky.puts)
    merge(family / "recipe.yaml", OUT, workers=1)
    assert len(flaky.puts) == sent


def test_half_of_a_bundle_is_no_bundle_and_the_same_command_goes_on(flaky, family, local):  # noqa: F811
    flaky.put_fails_at = "recipe.yaml"
    with pytest.raises(OSError, match="SlowDown"):
        merge(family / "recipe.yaml", OUT, workers=1)
    assert look_up(f"{OUT}/base/model.safetensors") is not None
    with pytest.raises(InputError, match="not completely published"):
        massmerge.load(OUT)
    flaky.put_fails_at = ""
    merge(family / "recipe.yaml", OUT, workers=1)
    assert contents(find_bundle(OUT)) == contents(local)


def test_another_bundle_at_the_address_stays_unless_it_is_overwritten(flaky, family, local):  # noqa: F811
    push_bundle(local, OUT)
    before = published_sha256(OUT)
    write_recipe(family, ["green", "red"], name="other.yaml")
    with pytest.raises(InputError, match=r"flaky://bucket/out: already holds a bundle.*--overwrite"):
        merge(family / "other.yaml", OUT, workers=1)
    assert published_sha256(OUT) == before
    merge(family / "other.yaml", OUT, workers=1, overwrite=True)
    assert published_sha256(OUT) != before
    assert [task.name for task in massmerge.Bundle(OUT).tasks] == ["green", "red"]


def test_a_bundle_is_loaded_from_an_address_and_fetched_once(flaky, local):  # noqa: F811
    push_bundle(local, OUT)
    model = massmerge.load(OUT, device="cpu")
    assert model.tasks == list(TASKS)
    read = flaky.bytes_read
    assert massmerge.load(OUT, device="cpu").tasks == model.tasks
    assert flaky.bytes_read - read == (local / MANIFEST).stat().st_size


def test_a_bundle_that_was_changed_at_its_address_is_refused(flaky, local, tmp_path):  # noqa: F811
    push_bundle(local, OUT)
    name = "base/model.safetensors"
    (tmp_path / "x").write_bytes((local / name).read_bytes()[:-4] + b"\1\2\3\4")
    put(tmp_path / "x", f"{OUT}/{name}")
    with pytest.raises(DamageError, match="SHA-256 differs"):
        massmerge.load(OUT)
    remove(f"{OUT}/{name}")
    with pytest.raises(DamageError, match="missing"):
        massmerge.load(OUT)


def test_a_manifest_that_leaves_its_folder_is_refused_before_anything_is_fetched(flaky, local, tmp_path):  # noqa: F811
    push_bundle(local, OUT)
    from massmerge.bundle.manifest import sign_manifest

    manifest = json.loads((local / MANIFEST).read_text())
    del manifest["sha256"]
    manifest["files"]["../outside"] = {"bytes": 1, "sha256": "0" * 64}
    sign_manifest(tmp_path, manifest)
    put(tmp_path / MANIFEST, f"{OUT}/{MANIFEST}")
    with pytest.raises(InputError, match="outside of the bundle"):
        massmerge.load(OUT)
    assert not list((tmp_path / "cache" / "bundles").rglob("*.safetensors"))


def test_a_bundle_at_an_address_is_changed_by_way_of_a_folder(flaky, local, tmp_path):  # noqa: F811
    push_bundle(local, OUT)
    for place in (OUT, find_bundle(OUT)):
        with pytest.raises(InputError, match="mass pull"):
            refuse_hub(place)
    assert contents(pull_bundle(OUT, tmp_path / "mine")) == contents(local)
    refuse_hub(tmp_path / "mine")


def test_a_base_by_reference_at_an_address_is_found_again(home, tmp_path):
    recipe = massmerge.Recipe.load(_recipe_by_reference(home, tmp_path))
    made = merge(recipe, tmp_path / "out", workers=1)
    manifest = json.loads((made / MANIFEST).read_text())
    assert manifest["base"]["location"] == f"{home}/base" and not (made / "base" / "model.safetensors").exists()
    assert massmerge.load(made, device="cpu").tasks == list(TASKS)


def _recipe_by_reference(home: str, folder: Path) -> Path:
    data = {
        "base": f"{home}/base",
        "tasks": [{"name": task, "expert": f"{home}/{task}"} for task in TASKS],
        "merge": {"base": "by_reference"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_experts_on_a_web_server_are_read_by_ranges(flaky, family, local, tmp_path):  # noqa: F811
    with serving(family) as (address, _):
        data = {
            "base": str(family / "base"),
            "tasks": [{"name": task, "expert": f"{address}/{task}"} for task in TASKS],
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(data))
        made = merge(tmp_path / "recipe.yaml", tmp_path / "out", workers=1)
    assert weights(made).keys() == weights(local).keys()
    assert made.joinpath("base/model.safetensors").read_bytes() == (local / "base/model.safetensors").read_bytes()


def test_the_command_takes_addresses(flaky, family, root, tmp_path):  # noqa: F811
    done = CliRunner().invoke(main, ["merge", str(family / "recipe.yaml"), OUT, "--workers", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["path"] == OUT
    push_bundle(text_bundle(root), "flaky://bucket/text")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    put(tmp_path / "rows.jsonl", "flaky://bucket/rows.jsonl")
    arguments = [
        "predict",
        "flaky://bucket/text",
        "flaky://bucket/rows.jsonl",
        "--column",
        "text",
        "--out",
        "flaky://bucket/answers.jsonl",
    ]
    done = CliRunner().invoke(main, arguments)
    answers = look_up("flaky://bucket/answers.jsonl")
    assert answers is not None, done.output
    with answers.open() as file:
        rows = [json.loads(line) for line in file]
    assert [row["input"] for row in rows] == ["flaky://bucket/rows.jsonl:1", "flaky://bucket/rows.jsonl:2"]
