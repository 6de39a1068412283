"""Where a base or an expert comes from: folders, files, the hub's cache, and the hub without a download."""

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import NotASafetensorsRepoError
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata
from huggingface_hub.utils import TensorInfo as HubTensorInfo
from safetensors.torch import load_file

from massmerge.checkpoints import find_source, open_base
from massmerge.errors import InputError
from massmerge.merging.open_recipe import make_plan
from models import FAMILIES, assert_same, open_pair, save_as, state_of, weights_of, write_recipe

COMMITS = {"main": "a" * 40, "v2": "b" * 40}
BERT = FAMILIES["bert"]


@pytest.fixture(scope="module")
def models():
    base = BERT.make_base()
    return {"base": base, **{name: BERT.make_expert(base, seed, 3) for seed, name in enumerate(COMMITS)}}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


def put_in_cache(cache, repo, model, revision="main", form="safetensors"):
    folder = cache / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(COMMITS[revision])
    return save_as(model, folder / "snapshots" / COMMITS[revision], form)


class FakeHub:
    """A hub whose repositories are folders; it keeps a record of the files that were fetched whole."""

    def __init__(self, root, folders):
        self.root, self.folders, self.fetched = root, folders, []

    def model_info(self, repo, revision=None):
        names = sorted(p.name for p in self.folders[repo].iterdir())
        return SimpleNamespace(sha=COMMITS[revision or "main"], siblings=[SimpleNamespace(rfilename=n) for n in names])

    def parse_safetensors_file_metadata(self, repo, filename, revision=None):
        state = load_file(self.folders[repo] / filename)
        codes = {torch.float32: "F32", torch.int64: "I64"}
        tensors = {n: HubTensorInfo(codes[t.dtype], list(t.shape), (0, t.nbytes)) for n, t in state.items()}
        return SafetensorsFileMetadata({}, tensors)

    def get_safetensors_metadata(self, repo, revision=None):
        files = sorted(p.name for p in self.folders[repo].glob("model*.safetensors"))
        if not files:
            raise NotASafetensorsRepoError(f"{repo} is no safetensors repository")
        headers = {name: self.parse_safetensors_file_metadata(repo, name) for name in files}
        return SafetensorsRepoMetadata(None, len(files) > 1, {}, headers)

    def hf_hub_download(self, repo, filename, revision=None):
        self.fetched.append(filename)
        target = self.root / repo / filename
        target.parent.mkdir(parents=True, exist_ok=True)
        return shutil.copyfile(self.folders[repo] / filename, target)


@pytest.fixture
def put_on_hub(tmp_path, cache, monkeypatch):
    """A function that opens a hub with these folders as its repositories."""

    def put(**folders):
        hub = FakeHub(tmp_path / "fetched", {f"org/{name}": folder for name, folder in folders.items()})
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.hf_hub_download)
        return hub

    return put


def test_a_path_is_relative_to_the_recipe(tmp_path):
    (tmp_path / "experts").mkdir()
    assert find_source("experts", tmp_path, download=False).path == (tmp_path / "experts").resolve()


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a valid name for a file or folder"):
        find_source("a\0b", tmp_path, download=False)


@pytest.mark.parametrize("text", ["./nowhere", "/nowhere/at/all", "a/b/c", "what is this"])
def test_a_missing_path_is_refused_with_the_place_that_was_looked_at(tmp_path, text):
    with pytest.raises(InputError, match=rf"{re.escape(text)}: no such file or folder \(looked for /"):
        find_source(text, tmp_path, download=False)


@pytest.mark.parametrize("download", [True, False])
def test_a_hub_id_that_is_not_in_the_cache_is_refused_offline_with_the_remedy(tmp_path, cache, download):
    with pytest.raises(InputError, match=r"org/nothing: no such file.*not available from the hub.*while online"):
        find_source("org/nothing", tmp_path, download=download)


@pytest.mark.parametrize(("text", "revision"), [("org/expert", "main"), ("org/expert@v2", "v2")])
@pytest.mark.parametrize("form", ["safetensors", "sharded safetensors", "bin", "sharded bin"])
def test_an_expert_in_the_cache_gives_the_weights_of_its_revision(tmp_path, cache, models, text, revision, form):
    models["base"].save_pretrained(tmp_path / "base")
    for name in COMMITS:
        put_in_cache(cache, "org/expert", models[name], name, form)
    base, expert = open_pair(tmp_path, text)
    assert_same(weights_of(base, expert), state_of(models[revision], BERT.base))


@pytest.mark.parametrize(
    ("text", "revision"), [("org/base", "main"), ("org/base@v2", "v2"), (f"org/base@{'b' * 40}", "v2")]
)
def test_a_source_in_the_cache_knows_its_commit(tmp_path, cache, models, text, revision):
    for name in COMMITS:
        put_in_cache(cache, "org/base", models["base"], name)
    assert find_source(text, tmp_path, download=True).revision == COMMITS[revision]


@pytest.fixture
def downloads(monkeypatch):
    """A record of what the hub was asked for, beyond what lies in the cache."""
    asked = []
    real = huggingface_hub.snapshot_download

    def snapshot_download(repo, *, local_files_only=False, **options):
        if not local_files_only:
            asked.append(options["allow_patterns"][-1])
        return real(repo, local_files_only=True, revision=options["revision"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_model_in_the_cache_is_not_asked_for_again(tmp_path, cache, models, downloads):
    put_in_cache(cache, "org/base", models["base"])
    find_source("org/base", tmp_path, download=True)
    assert downloads == []


def test_an_interrupted_download_is_taken_up_again(tmp_path, cache, models, downloads):
    snapshot = put_in_cache(cache, "org/base", models["base"], form="sharded safetensors")
    next(snapshot.glob("*.safetensors")).unlink()
    find_source("org/base", tmp_path, download=True)
    assert downloads[0] == "*.safetensors"


def test_pickles_are_asked_for_where_there_are_no_safetensors(tmp_path, cache, models, downloads):
    snapshot = put_in_cache(cache, "org/base", models["base"])
    (snapshot / "model.safetensors").rename(snapshot / "training_args.bin")  # a pickle, but not the weights
    find_source("org/base", tmp_path, download=True)
    assert downloads == ["*.safetensors", "*.bin"]


def test_a_folder_beside_the_recipe_goes_before_the_hub(tmp_path, cache, models):
    put_in_cache(cache, "org/base", models["base"])
    (tmp_path / "org" / "base").mkdir(parents=True)
    assert find_source("org/base", tmp_path, download=True).revision is None


@pytest.mark.parametrize("form", ["safetensors", "sharded safetensors"])
def test_a_remote_recipe_is_planned_like_a_local_one(tmp_path, models, put_on_hub, form):
    for name in ("base", "main"):
        save_as(models[name], tmp_path / name, form)
    local = make_plan(write_recipe(tmp_path, ["main"]))
    put_on_hub(base=tmp_path / "base", expert=tmp_path / "main")
    recipe = tmp_path / "remote.yaml"
    recipe.write_text("base: org/base\ntasks: [{name: main, expert: org/expert@v2}]\n")
    remote = make_plan(recipe)
    assert remote.problems == ()
    assert remote.tensors == local.tensors
    assert local.ranks_exact and not remote.ranks_exact  # the expert may change less than all
    assert replace(remote.sizes, rest=0) == replace(local.sizes, rest=0)  # the rest holds names and revisions
    assert remote.tasks[0].labels == local.tasks[0].labels
    assert remote.tasks[0].revision == COMMITS["v2"]


def test_planning_fetches_no_weights(tmp_path, models, put_on_hub):
    models["base"].save_pretrained(tmp_path / "base")
    hub = put_on_hub(base=tmp_path / "base")
    open_base(find_source("org/base", tmp_path, download=False))
    assert hub.fetched == ["config.json"]


def test_a_remote_base_without_data_refuses_to_be_read(tmp_path, models, put_on_hub):
    models["base"].save_pretrained(tmp_path / "base")
    put_on_hub(base=tmp_path / "base")
    base = open_base(find_source("org/base", tmp_path, download=False))
    with pytest.raises(InputError, match="not been downloaded"):
        base.read("embeddings.word_embeddings.weight")


def test_remote_pickles_are_refused_because_their_shapes_need_a_download(tmp_path, models, put_on_hub):
    save_as(models["base"], tmp_path / "base", "bin")
    put_on_hub(base=tmp_path / "base")
    with pytest.raises(InputError, match="org/base: has only pickled weights"):
        open_base(find_source("org/base", tmp_path, download=False))


def test_a_remote_adapter_without_a_readable_header_is_refused_by_name(tmp_path, put_on_hub):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    put_on_hub(adapter=tmp_path / "adapter")
    source = find_source("org/adapter", tmp_path, download=False)
    with pytest.raises(InputError, match=r"org/adapter: the header of adapter_model\.safetensors is not available"):
        source.store("adapter_model", "adapter_model")


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "not valid JSON"), ("[]", "holds no JSON object"), ('{"a":' * 100_000, "not valid JSON .nested too deeply")],
)
def test_a_json_file_that_is_none_is_refused_by_name(tmp_path, text, words):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(InputError, match=rf"adapter_config\.json: {words}"):
        find_source(".", tmp_path, download=False).json("adapter_config.json")
