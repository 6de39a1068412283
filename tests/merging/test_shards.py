"""Weights above `merge.max_shard_size`: several files and an index, read by all that reads weights."""

import json
import shutil

import pytest
import torch
import transformers as tf
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file

import massmerge
from changes import bundles
from massmerge.bundle.inspect import inspect_bundle
from massmerge.bundle.manifest import find_damage, read_manifest, sign_manifest
from massmerge.checkpoints.stores import open_folder
from massmerge.errors import InputError
from massmerge.io.shards import cut
from massmerge.io.tensor_file import TensorInfo
from massmerge.merging.open_recipe import make_plan
from massmerge.merging.verify import verify_bundle
from massmerge.model.load import load_routing
from massmerge.model.static import StaticModel
from models import FAMILIES, contents, rows_of, save_as, write_family, write_recipe

TASKS = ["a", "b", "c"]
INPUTS = rows_of(FAMILIES["bert"].make_inputs(4))
LIMIT = 20_000


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Experts with a bundle whose base is one file (`whole`), and one whose base is several (`cut`)."""
    folder = tmp_path_factory.mktemp("bert")
    write_family(folder, "bert", {"a": 2, "b": 3, "c": 4})
    for name, options in (("whole", {}), ("cut", {"max_shard_size": "20KB"})):
        massmerge.merge(write_recipe(folder, TASKS, name=f"{name}.yaml", rank=8, **options), folder / name)
    return folder


def shards(folder):
    return sorted(path.name for path in folder.glob("model-*.safetensors"))


def answers(path):
    return [(p.task, p.label, p.logit) for p in massmerge.load(path).predict(INPUTS)]


def test_tensors_go_to_files_as_transformers_cuts_them():
    sizes = [100, 5000, 300, 300, 400, 20_001, 7, 900]
    infos = {f"t{i}": TensorInfo((size,), torch.uint8) for i, size in enumerate(sizes)}
    state = {name: torch.zeros(info.shape, dtype=info.dtype) for name, info in infos.items()}
    for most in (1, 500, 1000, 5400, 30_000):
        theirs = split_torch_state_dict_into_shards(
            state, max_shard_size=most, filename_pattern="model{suffix}.safetensors"
        )
        ours = cut(infos, most)
        assert [name for names in ours.values() for name in names] == list(infos)
        assert all(sum(sizes[int(n[1:])] for n in names) <= most or len(names) == 1 for names in ours.values())
        assert {*map(len, ours)} == {*map(len, theirs.filename_to_tensors)}  # names of one form


def test_a_base_above_the_limit_is_in_several_files_with_an_index_of_all_its_tensors(family):
    base = family / "cut" / "base"
    index = json.loads((base / "model.safetensors.index.json").read_text())
    held = {name: file for file in shards(base) for name in load_file(base / file)}
    assert index["weight_map"] == held and not (base / "model.safetensors").exists()
    whole = load_file(family / "whole/base/model.safetensors")
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in whole.values())}
    assert shards(base)[0] == f"model-00001-of-{len(shards(base)):05d}.safetensors" and len(shards(base)) > 3
    for file in shards(base):
        tensors = load_file(base / file)
        assert sum(t.nbytes for t in tensors.values()) <= LIMIT or len(tensors) == 1
    assert read_manifest(family / "cut")["format_version"] == 4
    assert read_manifest(family / "whole")["format_version"] == 1


def test_transformers_opens_such_a_base(family):
    model, found = tf.AutoModel.from_pretrained(family / "cut" / "base", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = load_file(family / "whole/base/model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_all_that_is_not_the_base_is_the_same(family):
    different = {"README.md", "recipe.yaml", "mass.json"}
    one, other = contents(family / "whole"), contents(family / "cut")
    rest = {name for name in one if not name.startswith("base/model")} - different
    assert {n: other[n] for n in rest} == {n: one[n] for n in rest}
    assert other.keys() - one.keys() == {
        f"base/{n}" for n in (*shards(family / "cut/base"), "model.safetensors.index.json")
    }


def test_a_bundle_of_several_files_answers_as_one_of_one(family):
    assert answers(family / "cut") == answers(family / "whole")
    assert [r.selected for r in load_routing(family / "cut").route(INPUTS)] == [
        r.selected for r in load_routing(family / "whole").route(INPUTS)
    ]


@pytest.mark.parametrize("mapped", [True, False])
def test_damage_of_one_of_them_is_found_by_load_and_verify(family, tmp_path, mapped):
    shutil.copytree(family / "cut", tmp_path / "out")
    assert verify_bundle(tmp_path / "out", experts=True, folder=family).ok
    name = shards(tmp_path / "out/base")[1]
    path = tmp_path / "out/base" / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert verify_bundle(tmp_path / "out").damage == (f"base/{name}: its bytes have changed (SHA-256 differs)",)
    with pytest.raises(InputError, match=rf"{name}: its bytes have changed"):
        massmerge.load(tmp_path / "out", mapped=mapped).predict(INPUTS)


def test_an_index_that_names_what_is_not_the_bundles_is_refused(family, tmp_path):
    shutil.copytree(family / "cut", tmp_path / "out")
    index = tmp_path / "out/base/model.safetensors.index.json"
    said = json.loads(index.read_text())
    for place, words in (
        ("../../../x.safetensors", "outside of its folder"),
        ("x.safetensors", "does not list base/x"),
    ):
        said["weight_map"] = dict.fromkeys(said["weight_map"], place)
        index.write_text(json.dumps(said))
        with pytest.raises(InputError, match=words):
            massmerge.load(tmp_path / "out", check=False)


def test_the_plan_knows_an_upper_bound_and_inspect_the_same_figures(family):
    plan = make_plan(family / "cut.yaml")
    bundle = massmerge.Bundle(family / "cut")
    assert bundle.counted_bytes <= plan.sizes.counted < 1.2 * bundle.counted_bytes
    one, other = inspect_bundle(family / "whole"), inspect_bundle(family / "cut")
    assert (one.base_bytes, one.tasks) == (other.base_bytes, other.tasks)
    assert 0 < other.sizes["everything else"] - one.sizes["everything else"] < 20_000


def test_tasks_come_and_go_with_the_base_in_several_files(tmp_path):
    whole, two = bundles(tmp_path, merge={"rank": 8, "max_shard_size": LIMIT})
    massmerge.add(two, {"c": "c"}, folder=tmp_path, out=tmp_path / "grown")
    massmerge.remove(whole, "c", out=tmp_path / "shrunk")
    for found, expected in (("grown", whole), ("shrunk", two)):
        assert len(shards(tmp_path / found / "base")) > 3
        one, other = contents(tmp_path / found), contents(expected)
        assert {n: d for n, d in one.items() if n.startswith("base/")} == {
            n: d for n, d in other.items() if n.startswith("base/")
        }
        for ours, theirs in zip(answers(tmp_path / found), answers(expected), strict=True):
            assert ours[:2] == theirs[:2] and ours[2] == pytest.approx(theirs[2], abs=1e-5)


def test_the_shards_of_the_sources_have_no_part_in_it(family, tmp_path):
    recipe = write_recipe(tmp_path, TASKS, rank=8)
    for task in TASKS:
        shutil.copytree(family / task, tmp_path / task)
    save_as(tf.BertModel.from_pretrained(family / "base"), tmp_path / "base", "sharded safetensors")
    assert len(shards(tmp_path / "base")) > 1
    massmerge.merge(recipe, tmp_path / "out")
    name = "base/model.safetensors"
    assert contents(tmp_path / "out")[name] == contents(family / "whole")[name]


@pytest.mark.parametrize("method", ["average", "ties", "tsv_c"])
def test_a_static_merge_is_cut_too_and_answers_the_same(family, method):
    results = {}
    for name, options in (("whole", {}), ("cut", {"max_shard_size": "20KB"})):
        recipe = write_recipe(family, TASKS, name=f"{method}-{name}.yaml", method=method, **options)
        out = massmerge.merge(recipe, family / f"{method}-{name}")
        model = StaticModel(out)
        folder = out / "a" if model.needs_task else out
        tensors = {n: open_folder(folder).read(n) for n in open_folder(folder).infos}
        results[name] = tensors, [(p.label, p.logit) for p in model.predict(INPUTS, task="a")]
        assert len(shards(folder)) > 3 if name == "cut" else not shards(folder)
        assert find_damage(out, read_manifest(out)) == []
    (one, said), (other, expected) = results["whole"], results["cut"]
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    assert said == expected
    assert read_manifest(family / f"{method}-cut")["format_version"] == 4


def test_a_bundle_of_several_files_is_exported_and_pulled_again(family, tmp_path, monkeypatch):
    monkeypatch.setenv("MASS_CACHE", str(tmp_path / "cache"))
    massmerge.push(family / "cut", "memory://store/out")
    pulled = massmerge.pull("memory://store/out", tmp_path / "mine")
    assert contents(pulled) == contents(family / "cut")
    massmerge.export(pulled, tmp_path / "one", "hf", ["a"])
    assert (tmp_path / "one" / "config.json").is_file()


def test_a_manifest_without_index_and_weights_is_refused(family, tmp_path):
    shutil.copytree(family / "cut", tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    del manifest["files"]["base/model.safetensors.index.json"]
    sign_manifest(tmp_path / "out", manifest)
    with pytest.raises(InputError, match="lists neither weights nor the location of the base"):
        massmerge.load(tmp_path / "out")
