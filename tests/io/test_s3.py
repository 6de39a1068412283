"""Amazon's protocol by its real client, against a store on this machine. Both are of `make test-cluster`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import massmerge
from massmerge import merge
from massmerge.cli.main import main
from massmerge.errors import InputError, MassError
from massmerge.io import addresses, remote
from massmerge.io.remote import look_up, put
from massmerge.merging import run
from massmerge.merging.open_recipe import make_plan
from models import FAMILIES, contents, text_bundle, write_family, write_recipe
from remote import upload

pytest.importorskip("s3fs", reason="s3fs and moto are not installed: make test-cluster")
from s3 import s3_server

TASKS = {"red": 2, "green": 3}
HOME, OUT = "s3://bucket/work", "s3://bucket/out"


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
def store(monkeypatch, tmp_path):
    """The proxy of an empty store with one bucket, found as a client finds Amazon's: by the environment."""
    import boto3
    from s3fs import S3FileSystem

    with s3_server() as (url, proxy), monkeypatch.context() as patched:
        for name, value in {
            "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "eu-central-1", "AWS_MAX_ATTEMPTS": "2", "MASS_CACHE": str(tmp_path / "cache"),
        }.items():  # fmt: skip
            patched.setenv(name, value)
        patched.setattr(addresses, "WAITS", (0.0,) * 4)
        where = {"LocationConstraint": "eu-central-1"}
        boto3.client("s3").create_bucket(Bucket="bucket", CreateBucketConfiguration=where)
        S3FileSystem.clear_instance_cache()
        remote._opened.cache_clear()
        yield proxy
        S3FileSystem.clear_instance_cache()
        remote._opened.cache_clear()


@pytest.fixture
def home(store, family) -> str:
    """The address of recipe, base and experts."""
    upload(family, HOME)
    store.sent = 0
    return HOME


def weights(folder: Path) -> dict[str, bytes]:
    """The files of a bundle that do not name its sources."""
    return {name: data for name, data in contents(folder).items() if name.endswith((".safetensors", "labels.json"))}


def test_a_plan_reads_a_small_part_of_the_files(store, tmp_path):
    base = FAMILIES["bert"].make_base(hidden_size=256, intermediate_size=1024)
    base.save_pretrained(tmp_path / "base")
    base.save_pretrained(tmp_path / "red")
    write_recipe(tmp_path, ["red"])
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    own = make_plan(tmp_path / "recipe.yaml")
    upload(tmp_path, HOME)
    found = make_plan(f"{HOME}/recipe.yaml")
    assert not found.errors and (found.sizes.base, found.base) == (own.sizes.base, f"{HOME}/base")
    assert 0 < store.sent < stored / 20


def test_a_merge_from_s3_to_s3_gives_the_same_bundle_though_reads_are_throttled_and_cut(home, store, local):
    store.throttle_every, store.cut_every = 10, 13
    merge(f"{home}/recipe.yaml", OUT, workers=2)
    assert store.spoilt > 10
    manifest = [line for line in store.asked if line.startswith("PUT") and "/out/" in line][-1]
    assert "/out/mass.json" in manifest
    assert weights(massmerge.Bundle(OUT).path) == weights(local)


def test_a_bundle_answers_from_s3_and_rows_come_and_go(store, root, tmp_path):
    massmerge.push(text_bundle(root), OUT)
    texts = ["win a free phone", "a moving film", "the team scored a goal"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    put(tmp_path / "rows.jsonl", "s3://bucket/rows.jsonl")
    store.throttle_every, store.cut_every = 7, 11
    answers = "s3://bucket/answers.jsonl"
    done = CliRunner().invoke(main, ["predict", OUT, "s3://bucket/rows.jsonl", "--column", "text", "--out", answers])
    assert done.exit_code == 0, done.output
    with look_up(answers).open() as file:
        found = [json.loads(line) for line in file]
    expected = massmerge.load(text_bundle(root)).predict(texts)
    assert [(row["task"], row["label"]) for row in found] == [(p.task, p.label) for p in expected]
    assert contents(massmerge.pull(OUT, tmp_path / "mine")) == contents(text_bundle(root))


def test_a_source_that_is_replaced_during_a_merge_stops_it(home, store, family, tmp_path, monkeypatch):
    assemble = run._Run.assemble

    def replaced(self) -> None:
        assemble(self)
        put(family / "green" / "model.safetensors", f"{home}/red/model.safetensors")

    monkeypatch.setattr(run._Run, "assemble", replaced)
    with pytest.raises(MassError, match=r"task red: .*model.safetensors changed while it was being read"):
        merge(f"{home}/recipe.yaml", tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def test_what_is_not_there_is_named(store):
    assert look_up("s3://bucket/none") is None
    for address in (f"{HOME}/recipe.yaml", "s3://elsewhere/recipe.yaml"):
        with pytest.raises(InputError, match=f"{address}: no such"):
            make_plan(address)


def test_a_store_that_stays_busy_is_told_with_the_way_to_go_on(home, store, tmp_path, monkeypatch):
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)  # the client's own attempts come on top of ours
    found = look_up(f"{home}/red/model.safetensors")
    store.throttle_every = 1
    with found.open() as file, pytest.raises(OSError, match=r"reduce your request rate.*tried 5 times"):
        file.read(10)
