import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from massmerge import InputError, merge
from massmerge.bundle.layout import MANIFEST
from massmerge.bundle.manifest import write_manifest
from massmerge.io.tensor_file import read_tensors, write_tensors
from massmerge.merging.verify import verify_bundle
from models import FAMILIES, contents, rewrite, write_family, write_recipe

FACTORS = "tasks/red/factors.safetensors"
MATRIX = "encoder.layer.1.output.dense.weight"


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    recipe = write_family(folder, "bert", {"red": 2, "green": 3}, router={"first_pass": "fixed"})
    for place in ("base", "red"):
        (folder / place / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    merge(recipe, folder / "out", workers=1)
    return folder


@pytest.fixture
def bundle(family, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(family / "out", tmp_path / "bundle"))


def tamper(bundle: Path, change) -> None:
    """Change the tensors of a task and sign the bundle again, so that every checksum is right."""
    tensors = dict(read_tensors(bundle / FACTORS))
    change(tensors)
    write_tensors(bundle / FACTORS, tensors)
    data = json.loads((bundle / MANIFEST).read_text())
    write_manifest(bundle, {k: v for k, v in data.items() if k not in ("files", "sha256", "format_version")})


def test_a_bundle_as_it_was_written_is_right(family):
    result = verify_bundle(family / "out", experts=True, folder=family)
    assert result.ok and [t.task for t in result.tasks] == ["red", "green"]


def test_the_error_of_a_task_is_what_its_ranks_cost(family):
    result = verify_bundle(family / "out", experts=True, folder=family)
    for task in result.tasks:
        assert 0 < task.error < 1
        assert all(e.error == pytest.approx(e.promised, abs=1e-3) for e in task.worst)
        assert [e.error for e in task.worst] == sorted((e.error for e in task.worst), reverse=True)


KINDS = [
    "README.md", "recipe.yaml", "statistics.safetensors", "fixed.safetensors", "processor/vocab.txt", "base/config.json",
    "base/model.safetensors", FACTORS, "tasks/red/labels.json", "tasks/red/head/config.json",
    "tasks/red/head/model.safetensors",
]  # fmt: skip


def test_every_kind_of_file_is_among_those_that_are_spoiled_here(family):
    assert set(contents(family / "out")) == {*KINDS, *(k.replace("red", "green") for k in KINDS), MANIFEST}


@pytest.mark.parametrize("name", KINDS)
def test_one_flipped_bit_is_found(bundle, name):
    data = bytearray((bundle / name).read_bytes())
    data[len(data) // 2] ^= 4
    (bundle / name).write_bytes(data)
    assert verify_bundle(bundle).damage == (f"{name}: its bytes have changed (SHA-256 differs)",)


def test_one_flipped_bit_of_the_manifest_is_found_wherever_it_is(bundle):
    data = (bundle / MANIFEST).read_bytes()
    for position in range(0, len(data), 97):
        changed = bytearray(data)
        changed[position] ^= 1
        (bundle / MANIFEST).write_bytes(changed)
        with pytest.raises(InputError, match=r"mass\.json"):
            verify_bundle(bundle)


def test_a_file_that_was_cut_short_is_found(bundle):
    size = (bundle / FACTORS).stat().st_size
    (bundle / FACTORS).write_bytes((bundle / FACTORS).read_bytes()[:-1])
    assert verify_bundle(bundle).damage == (f"{FACTORS}: {size - 1} bytes, should be {size}",)


def test_a_file_that_is_missing_is_found(bundle):
    (bundle / "recipe.yaml").unlink()
    assert verify_bundle(bundle).damage == ("recipe.yaml: missing",)


def scale(tensors):
    tensors[f"{MATRIX}.s"] *= 1.05


def flip(tensors):
    tensors[f"{MATRIX}.u"][:, 0] *= -1


def remove(tensors):
    for part in "usv":
        del tensors[f"{MATRIX}.{part}"]


def spoil(tensors):
    tensors[f"{MATRIX}.v"][0, 0] = torch.nan


@pytest.mark.parametrize("change", [scale, flip, remove, spoil])
def test_a_factor_that_was_tampered_with_is_found_by_comparing_with_the_expert(family, bundle, change):
    tamper(bundle, change)
    result = verify_bundle(bundle, experts=True, folder=family)
    red, green = result.tasks
    assert not result.damage and not result.ok
    assert len(red.faults) == 1 and red.faults[0].startswith(MATRIX) and not green.faults


def test_a_whole_tensor_that_was_tampered_with_is_found_by_comparing_with_the_expert(family, bundle):
    tamper(bundle, lambda tensors: tensors["encoder.layer.0.output.dense.bias"].add_(1e-6))
    (fault,) = verify_bundle(bundle, experts=True, folder=family).tasks[0].faults
    assert fault == "encoder.layer.0.output.dense.bias: not the expert's value"


def test_a_change_that_the_expert_does_not_have_is_found(family, tmp_path):
    shutil.copytree(family, tmp_path, dirs_exist_ok=True)
    base = load_file(family / "base" / "model.safetensors")
    rewrite(tmp_path / "red", lambda state: state | {f"bert.{MATRIX}": base[MATRIX]})
    (fault,) = verify_bundle(family / "out", experts=True, folder=tmp_path).tasks[0].faults
    assert fault == f"{MATRIX}: the bundle changes it, the expert does not"


def test_an_expert_that_was_trained_further_is_found(tmp_path):
    recipe = write_family(tmp_path, "bert", {"red": 2})
    out = merge(recipe, tmp_path / "out", workers=1)
    FAMILIES["bert"].make_expert(FAMILIES["bert"].make_base(), seed=50).save_pretrained(tmp_path / "red")
    assert len(verify_bundle(out, experts=True, folder=tmp_path).tasks[0].faults) > 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bundle_in_half_precision_is_right(tmp_path, dtype):
    family = FAMILIES["bert"]
    base = family.make_base().to(dtype)
    base.save_pretrained(tmp_path / "base")
    family.make_expert(base.float(), 1).to(dtype).save_pretrained(tmp_path / "red")
    out = merge(write_recipe(tmp_path, ["red"], rank=0.999), tmp_path / "out", workers=1)
    assert verify_bundle(out, experts=True, folder=tmp_path).ok


def test_experts_that_are_not_found_are_named_with_the_option_that_helps(family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"no such file or folder(.|\n)*use --folder to change that"):
        verify_bundle(family / "out", experts=True)


def write_trained(folder: Path, tasks: list[str]) -> Path:
    """Experts whose vocabulary-high word embedding was trained by AdamW: few rows by gradients, all by weight decay."""
    family = FAMILIES["bert"]
    size = {"vocab_size": 30_522, "num_hidden_layers": 1, "hidden_size": 64}
    base = family.make_base(**size)
    base.save_pretrained(folder / "base")
    for seed, task in enumerate(tasks):
        torch.manual_seed(seed)
        expert = family.expert(family.make_config(**size))
        expert.bert.load_state_dict(base.state_dict())
        optimizer = torch.optim.AdamW(expert.parameters(), lr=5e-5)
        for _ in range(20):
            ids = (torch.rand(16, 20).pow(4) * 30_000).long()
            expert(input_ids=ids, labels=ids.sum(1) % 2).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        expert.save_pretrained(folder / task)
    return write_recipe(folder, tasks, rank=8)


def test_a_word_embedding_that_was_trained_is_as_its_rank_promises(tmp_path):
    out = merge(write_trained(tmp_path, ["red"]), tmp_path / "out", workers=1)
    (task,) = verify_bundle(out, experts=True, folder=tmp_path).tasks
    (tall,) = [e for e in task.worst if e.tensor == "embeddings.word_embeddings.weight"]
    assert not task.faults
    assert tall.error**2 == pytest.approx(tall.promised**2, abs=1e-6)
