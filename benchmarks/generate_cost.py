"""CPU time of a mixed batch of eight LoRA adapters of a Llama, as ratios to PEFT.

    python benchmarks/generate_cost.py [--repeats 3] [--prompt 48] [--new 16 4]

A Llama of SmolLM2-135M's size with random weights, and eight LoRA adapters of rank 8 on all linear layers; one batch of 8
prompts of different lengths, one per task. Every side generates as many tokens for the same prompts. PEFT with the adapter
known runs them with one adapter. All sides run in turns in one process on one core; medians of CPU time are compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import massmerge as mm
from massmerge import Routing

TASKS = tuple("abcdefgh")
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_bundle(folder: Path) -> Path:
    """A base of the size of SmolLM2-135M, eight adapters of it, and their bundle."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        pad_token_id=2,
    )  # fmt: skip
    base = LlamaForCausalLM(config).eval()
    base.save_pretrained(folder / "base")
    adapter = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=LAYERS, task_type="CAUSAL_LM"))
    for task in TASKS:
        with torch.no_grad():
            for name, parameter in adapter.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.02)
        adapter.save_pretrained(folder / task)
    recipe = folder / "recipe.yaml"
    recipe.write_text("base: base\ntasks:\n" + "".join(f"  - {{name: {task}, expert: {task}}}\n" for task in TASKS))
    mm.merge(recipe, folder / "out")
    return folder / "out"


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Prompts as a batch with padding on the left, as transformers wants it."""
    longest = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=2) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    return {"input_ids": ids, "attention_mask": mask}


def sides_of(path: Path, longest: int, options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """What is compared; `options` are read at each call."""
    model = mm.load(path, check=False)
    base = LlamaForCausalLM.from_pretrained(path.parent / "base").eval()
    peft = PeftModel.from_pretrained(base, path.parent / "a", adapter_name="a").eval()
    for task in TASKS[1:]:
        peft.load_adapter(path.parent / task, adapter_name=task)
    seeds = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, 49152, (longest - 2 * i,), generator=seeds) for i in range(len(TASKS))]
    batch = padded(rows)
    ready = [{"input_ids": row} for row in rows]
    given = [Routing({}, {task: 1.0}, [task], "given") for task in TASKS]

    def known() -> Any:
        peft.set_adapter("c")
        return peft.generate(**batch, pad_token_id=2, **options)

    def mixed() -> Any:
        return peft.generate(**batch, adapter_names=list(TASKS), pad_token_id=2, **options)

    return {
        "PEFT, one adapter, known": known,
        "PEFT, mixed `adapter_names`": mixed,
        "bundle, one task given": lambda: model.generate(ready, task="c", **options),
        "bundle, eight tasks given": lambda: model.write(ready, given, **options),
        "bundle, routed": lambda: model.generate(ready, **options),
    }


def medians(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each side, taken in turns after a round that warms up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, run in sides.items():
            began = time.process_time()
            run()
            times[name].append(time.process_time() - began)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, nargs="+", default=[16, 4], help="new tokens, of one table after the other")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        sides = sides_of(make_bundle(Path(temporary)), asked.prompt, options)
        for new in asked.new:
            options |= {"max_new_tokens": new, "min_new_tokens": new}
            print(f"\n{new} new tokens\n")
            show(medians(sides, asked.repeats))


def show(found: dict[str, float]) -> None:
    """Print a table."""
    known, mixed = (found[name] for name in list(found)[:2])
    print("| case | CPU seconds | times PEFT, known | times PEFT, mixed |\n|---|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {seconds:.2f} | {seconds / known:.2f} | {seconds / mixed:.2f} |", flush=True)


if __name__ == "__main__":
    main()
