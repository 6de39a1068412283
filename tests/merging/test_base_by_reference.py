"""Bases of the hub that a bundle refers to: the commit stands for their bytes, which nobody reads to know them again."""

import os
import pickle
from pathlib import Path

import huggingface_hub
import peft
import pytest
import transformers as tf
from safetensors.torch import save_file

import massmerge
import massmerge.bundle.base
from changes import write_adapter
from massmerge.bundle.manifest import read_manifest, sign_manifest
from massmerge.bundle.merge_folder import MergeFolder
from massmerge.engines.local import LocalEngine
from massmerge.errors import InputError
from massmerge.merging.job import MergeJob
from massmerge.merging.open_recipe import open_recipe
from massmerge.merging.worker import MergeWorker
from models import FAMILIES, write_recipe

COMMIT = "c" * 40
TASKS = ["a", "b"]


@pytest.fixture(params=["small", "large"])
def weights(request, tmp_path, monkeypatch):
    """The weights of a base in the hub's cache, most of them in one tensor; `recipe.yaml` merges two adapters of it."""
    if request.param == "large":
        monkeypatch.setattr(massmerge.bundle.base, "LARGE", 1000)
    snapshot = tmp_path / "cache" / "models--me--base" / "snapshots" / COMMIT
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache/models--me--base/refs").mkdir(parents=True)
    (tmp_path / "cache/models--me--base/refs/main").write_text(COMMIT)
    FAMILIES["bert"].make_base(vocab_size=20_000).save_pretrained(snapshot)
    (tmp_path / "base").symlink_to(snapshot)
    for seed, task in enumerate(TASKS):
        kind = tf.BertForSequenceClassification
        write_adapter(tmp_path, task, kind, seed, task_type=peft.TaskType.SEQ_CLS, target_modules=["query", "value"])
    recipe = write_recipe(tmp_path, TASKS, base="me/base", rank=4)
    recipe.write_text(recipe.read_text().replace("rank: 4", "rank: 4\n  base: by_reference"))
    return snapshot / "model.safetensors"


class Counted:
    """An open file that counts the bytes that are read of it; one that is mapped counts as read."""

    def __init__(self, file, counts):
        self._file, self._counts = file, counts

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def read(self, *size):
        found = self._file.read(*size)
        self._counts.append(len(found))
        return found

    def readinto(self, buffer):
        count = self._file.readinto(buffer)
        self._counts.append(count)
        return count

    def fileno(self):
        self._counts.append(os.fstat(self._file.fileno()).st_size)
        return self._file.fileno()


@pytest.fixture
def bytes_read(weights, monkeypatch):
    """A function: how many bytes of the base's weights have been read so far."""
    real, counts = Path.open, []

    def opened(path, *args, **kwargs):
        file = real(path, *args, **kwargs)
        return Counted(file, counts) if path.resolve() == weights.resolve() else file

    monkeypatch.setattr(Path, "open", opened)
    return lambda: sum(counts)


def test_a_merge_of_adapters_and_a_load_leave_most_bytes_of_the_base_unread(weights, bytes_read, tmp_path):
    bundle = massmerge.merge(tmp_path / "recipe.yaml", tmp_path / "out", workers=1)
    said = read_manifest(bundle)["base"]
    assert (said["location"], said["revision"]) == (f"me/base@{COMMIT}", COMMIT)
    assert 0 < bytes_read() < weights.stat().st_size / 2
    merged = bytes_read()
    assert massmerge.load(bundle).tasks == TASKS
    massmerge.remove(bundle, "b", out=tmp_path / "one")
    assert bytes_read() - merged < weights.stat().st_size / 2


def test_a_base_that_is_not_the_one_that_was_merged_is_refused_by_its_first_bytes(weights, tmp_path):
    bundle = massmerge.merge(tmp_path / "recipe.yaml", tmp_path / "out", workers=1)
    other = FAMILIES["bert"].make_base(vocab_size=20_000).state_dict()
    save_file({name: tensor + 1 for name, tensor in other.items()}, weights, {"format": "pt"})
    with pytest.raises(InputError, match="has changed since the merge"):
        massmerge.load(bundle)


@pytest.mark.parametrize("weights", ["small"], indirect=True)
def test_a_bundle_whose_manifest_has_the_sum_of_all_bytes_still_loads(weights, tmp_path):
    """As earlier versions wrote it for bases of the hub up to 2 GB."""
    bundle = massmerge.merge(tmp_path / "recipe.yaml", tmp_path / "out", workers=1)
    base = massmerge.bundle.base.open_base(massmerge.bundle.base.find_source("me/base", Path(), download=True))
    manifest = read_manifest(bundle)
    said = manifest["base"] | {"sha256": massmerge.bundle.base._digest(base, None)}
    assert said != manifest["base"]
    sign_manifest(bundle, manifest | {"base": said})
    assert massmerge.load(bundle).tasks == TASKS


@pytest.fixture
def elsewhere(tmp_path):
    """A function that opens the merge as a worker does which is sent it, after something was done to the machine."""

    def opened(base: str, change) -> MergeWorker:
        path = write_recipe(tmp_path, TASKS, base=base, name="job.yaml", rank=4)
        path.write_text(path.read_text().replace("rank: 4", "rank: 4\n  base: by_reference"))
        prepared = open_recipe(massmerge.Recipe.load(path), tmp_path, download=True)
        prepared.files.sums([p for task in TASKS for p in prepared.experts[task].source.files()], LocalEngine(1))
        sent = pickle.dumps(MergeJob.of(prepared, MergeFolder(tmp_path / "out", ""), ""))
        change()
        return pickle.loads(sent).open()

    return opened


def test_a_machine_with_its_own_download_of_a_commit_takes_part_without_reading_it(weights, bytes_read, elsewhere):
    worker = elsewhere("me/base", lambda: os.utime(weights, (1, 1)))
    assert isinstance(worker, MergeWorker)
    assert bytes_read() < weights.stat().st_size / 2


def test_a_machine_whose_download_is_cut_short_is_refused(weights, elsewhere):
    def shorten():
        state = FAMILIES["bert"].make_base(vocab_size=20_000).state_dict()
        save_file({name: tensor for name, tensor in state.items() if "pooler" not in name}, weights, {"format": "pt"})

    with pytest.raises(InputError, match="is not the file that the merge was planned with"):
        elsewhere("me/base", shorten)


def test_a_file_that_no_commit_or_checksum_describes_is_refused_unread(weights, bytes_read, elsewhere):
    with pytest.raises(InputError, match="is not the file that the merge was planned with"):
        elsewhere("base", lambda: os.utime(weights, (1, 1)))
    assert bytes_read() < weights.stat().st_size / 2
