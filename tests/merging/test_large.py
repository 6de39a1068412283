"""A base of 7 billion parameters with 20 adapters: sparse files, of which a merge may read little."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

import massmerge
from massmerge.bundle.base import LARGE
from massmerge.io.tensor_file import TensorInfo, header_bytes

TASKS = [f"t{i:02}" for i in range(20)]
CONFIG = tf.LlamaConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip
RANK = 2


def write_base(folder: Path) -> int:
    """Llama 2 7B's shapes in three shards without data: files with holes, which read as zeros. Returns its bytes."""
    with torch.device("meta"):
        state = tf.LlamaModel(CONFIG).state_dict()
    CONFIG.save_pretrained(folder)
    names = sorted(state)
    weight_map, total = {}, 0
    for shard in range(3):
        path = folder / f"model-{shard + 1:05}-of-00003.safetensors"
        infos = {f"model.{n}": TensorInfo(tuple(state[n].shape), torch.bfloat16) for n in names[shard::3]}
        size = sum(info.nbytes for info in infos.values())
        with path.open("wb") as file:
            file.write(header_bytes(infos))
            file.truncate(file.tell() + size)
        weight_map |= dict.fromkeys(infos, path.name)
        total += size
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def write_adapter(folder: Path, seed: int) -> None:
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(0, CONFIG.num_hidden_layers, 8):  # as `layers_to_transform` has it
        for name in ("q_proj", "v_proj"):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(RANK, 4096, generator=generator).bfloat16()
            tensors[f"{path}.lora_B.weight"] = torch.randn(4096, RANK, generator=generator).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK,
              "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 8, 16, 24]}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    """The recipe, and the bytes of its base."""
    folder = tmp_path_factory.mktemp("seven")
    size = write_base(folder / "base")
    for seed, task in enumerate(TASKS):
        write_adapter(folder / task, seed)
    tasks = [{"name": task, "expert": task} for task in TASKS]
    recipe = folder / "recipe.yaml"
    router = {"site": "A0"}  # what a load looks at lies before the first block
    recipe.write_text(json.dumps({"base": "base", "tasks": tasks, "merge": {"rank": RANK}, "router": router}))
    return recipe, size


MERGE = """
import re, sys
import massmerge
# Not `ru_maxrss`, which begins with what the process that started this one holds.
most = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
massmerge.merge(sys.argv[1], sys.argv[2], workers=2)
peak = most()
model = massmerge.load(sys.argv[2], dtype="bfloat16")
assert model.core.base.layers[31].mlp.up_proj.weight.dtype.itemsize == 2
reads = {k: int(v) for k, v in (line.split(": ") for line in open("/proc/self/io"))}
print(peak, most(), reads["rchar"])
"""


def test_twenty_adapters_of_a_7b_base_are_merged_and_loaded_in_the_memory_that_was_planned(seven):
    recipe, size = seven
    plan = massmerge.make_plan(recipe)
    assert size > 13e9 and plan.sizes.base == pytest.approx(size, rel=1e-5)
    out = recipe.parent / "out"
    done = subprocess.run([sys.executable, "-c", MERGE, recipe, out], capture_output=True, text=True, check=True)
    peak, loaded, read = map(int, done.stdout.split())
    written = {p.relative_to(out).as_posix(): p.stat().st_size for p in out.rglob("*") if p.is_file()}
    factors = sum(n for name, n in written.items() if name.endswith("factors.safetensors"))
    assert factors == pytest.approx(plan.sizes.factors, rel=0.01)
    assert sum(written.values()) - factors <= plan.sizes.rest
    assert size > LARGE and not any(name.startswith("base/model") for name in written)  # kept by reference
    assert 0.5 * plan.peak_memory < peak < 1.1 * plan.peak_memory < 1e9
    assert loaded < 1e9  # the base stays in its files
    assert read < 1e9  # of the base hardly more than headers
    assert plan.seconds < 10
