"""What `mass plan` takes and whether its estimate of time is right: `python benchmarks/plan_cost.py`.

`large` plans a base of 70B parameters with 100 LoRA adapters from files that have headers and no contents. `merges` compares
the estimate with merges of three kinds, `small` with three of a small model, `static` with two that factor nothing.
Processor time by the number of workers is compared, which other programs hardly affect.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from transformers import BertModel, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import massmerge as mm
from many_adapters import write_sources
from vit_b32 import make_recipe

logging.disable_progress_bar()
CASES = ("large", "merges", "small", "static")
RANK, MOST_SECONDS, MOST_FACTOR, WORKERS = 16, 15.0, 2.0, 2
SIZES = {
    "70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, dtype="bfloat16",
    ),
    "135M": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True,
    ),
}  # fmt: skip


def linear_layers(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """The shape of every linear layer of the blocks."""
    d, wide, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    narrow = d // heads * config.num_key_value_heads
    block = {
        "self_attn.q_proj": (d, d), "self_attn.k_proj": (narrow, d), "self_attn.v_proj": (narrow, d),
        "self_attn.o_proj": (d, d), "mlp.gate_proj": (wide, d), "mlp.up_proj": (wide, d), "mlp.down_proj": (d, wide),
    }  # fmt: skip
    return {f"model.layers.{i}.{k}": shape for i in range(config.num_hidden_layers) for k, shape in block.items()}


def write_header(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str, size: int) -> None:
    """A safetensors file with a header and a hole where its numbers would be."""
    entries, at = {}, 0
    for name, shape in shapes.items():
        end = at + size * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + at)


def write_base(folder: Path, config: LlamaConfig) -> None:
    """The headers of a base."""
    d, base = config.hidden_size, folder / "base"
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(base)
    norms = ["input_layernorm", "post_attention_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear_layers(config).items()}
    shapes |= {f"model.layers.{i}.{n}.weight": (d,) for i in range(config.num_hidden_layers) for n in norms}
    shapes |= {"model.embed_tokens.weight": (config.vocab_size, d), "model.norm.weight": (d,)}
    write_header(base / "model.safetensors", shapes | {"lm_head.weight": (config.vocab_size, d)}, "BF16", 2)


def write_adapters(folder: Path, config: LlamaConfig, count: int, *, full: bool) -> Path:
    """Adapters of all linear layers with random numbers, or with none; returns a recipe."""
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK}
    shapes = {
        f"base_model.model.{name}.lora_{part}.weight": shape
        for name, (m, n) in linear_layers(config).items()
        for part, shape in (("A", (RANK, n)), ("B", (m, RANK)))
    }
    for number in range(count):
        place = folder / f"adapter{number}"
        place.mkdir()
        (place / "adapter_config.json").write_text(json.dumps(said), encoding="utf-8")
        path = place / "adapter_model.safetensors"
        write_header(path, shapes, "F32", 4)
        if full:
            from safetensors.torch import save_file

            save_file({name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}, path)
    tasks = [{"name": f"t{i}", "expert": f"adapter{i}"} for i in range(count)]
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"base": "base", "tasks": tasks}), encoding="utf-8")
    return recipe


def large(adapters: int) -> bool:
    """Plan 70B; whether it stays within its bound."""
    with tempfile.TemporaryDirectory() as place:
        write_base(Path(place), SIZES["70B"])
        recipe = write_adapters(Path(place), SIZES["70B"], adapters, full=False)
        mm.Recipe.load(recipe)  # libraries are imported here
        began = time.process_time()
        plan = mm.make_plan(recipe)
        seconds = time.process_time() - began
    print(
        f"70B, {adapters} adapters: planned in {seconds:.1f} s; merge {plan.seconds / 3600:.2f} h, {plan.sizes.ratio:.3f} x"
    )
    return seconds <= MOST_SECONDS


def measured(name: str, recipe: Path) -> bool:
    """Merge; whether the estimate is within a factor of two."""
    with tempfile.TemporaryDirectory(dir=recipe.parent) as place:
        said = mm.make_plan(recipe).seconds
        began = time.process_time()
        mm.merge(recipe, Path(place) / "out", workers=WORKERS)
        took = (time.process_time() - began) / WORKERS
    factor = max(said / took, took / said)
    print(f"{name}: estimated {said:.1f} s, took {took:.1f} s: {'holds' if factor <= MOST_FACTOR else 'missed'}")
    return factor <= MOST_FACTOR


def merges() -> list[bool]:
    """Full fine-tunes of two numbers of tasks, and adapters."""
    with tempfile.TemporaryDirectory() as place:
        LlamaForCausalLM(SIZES["135M"]).save_pretrained(Path(place) / "base")
        adapters = write_adapters(Path(place), SIZES["135M"], 8, full=True)
        return [
            measured("ViT-B/32, 2 full fine-tunes", make_recipe(2)),
            measured("ViT-B/32, 4 full fine-tunes", make_recipe(4)),
            measured("Llama of 135M, 8 adapters", adapters),
        ]


def small() -> list[bool]:
    """The same of a BERT of 11M parameters without its embeddings, in a minute."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        adapters = write_sources(folder, 20)
        for number in range(6):
            model = BertModel.from_pretrained(folder / "base")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape) * 1e-3)
            model.save_pretrained(folder / f"full{number}")

        def full(count: int) -> Path:
            tasks = [{"name": f"t{i}", "expert": f"full{i}"} for i in range(count)]
            recipe = folder / f"full{count}.yaml"
            recipe.write_text(yaml.safe_dump({"base": "base", "tasks": tasks}), encoding="utf-8")
            return recipe

        return [
            measured("BERT of 6 blocks, 2 full fine-tunes", full(2)),
            measured("BERT of 6 blocks, 6 full fine-tunes", full(6)),
            measured("BERT of 6 blocks, 20 adapters", adapters),
        ]


def static() -> list[bool]:
    """Static merges of ViT-B/32's size: every number read once, and four times."""
    given = yaml.safe_load(make_recipe(4).read_text(encoding="utf-8"))
    held = []
    for method in ("task_arithmetic", "ties"):
        recipe = make_recipe(4).with_name(f"{method}.yaml")
        recipe.write_text(yaml.safe_dump(given | {"merge": {"method": method}}), encoding="utf-8")
        held.append(measured(f"ViT-B/32, 4 full fine-tunes, {method}", recipe))
    return held


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["large", "merges", "static"], choices=CASES)
    parser.add_argument("--adapters", type=int, default=100)
    options = parser.parse_args()
    held = [large(options.adapters)] if "large" in options.cases else []
    held += merges() if "merges" in options.cases else []
    held += small() if "small" in options.cases else []
    held += static() if "static" in options.cases else []
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
