"""Cost of generating with a bundle, as ratios to transformers' `generate` on a plain checkpoint.

    python benchmarks/generate_cost.py [--repeats 5]

A GPT-2 of 4 blocks of width 384 and four experts, random weights, twice the base's size; 8 prompts of 16 tokens, 16 new
tokens each. All sides run in turns in one process, on one core; medians of CPU time are compared.
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
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import massmerge as mm

TASKS = ("a", "b", "c", "d")
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16}


def make_bundle(folder: Path) -> Path:
    """A base, four experts and their bundle."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=4000, n_embd=384, n_layer=4, n_head=6, n_positions=128, bos_token_id=1, eos_token_id=2
    )
    model = GPT2LMHeadModel(config)
    model.save_pretrained(folder / "base")
    for task in TASKS:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        model.save_pretrained(folder / task)
    recipe = folder / "recipe.yaml"
    recipe.write_text("base: base\ntasks:\n" + "".join(f"  - {{name: {task}, expert: {task}}}\n" for task in TASKS))
    mm.merge(recipe, folder / "out")
    return folder / "out"


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
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        path = make_bundle(Path(temporary))
        model, cached = mm.load(path, check=False), mm.load(path, check=False, cache="500MB")
        plain = GPT2LMHeadModel.from_pretrained(path.parent / "a").eval()
        ids = torch.randint(3, 4000, (8, 16), generator=torch.Generator().manual_seed(5))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        rows = [{"input_ids": row} for row in ids]
        for _ in range(4):
            cached.generate(rows, task="a", **OPTIONS)
        groups = {task: rows[2 * i : 2 * i + 2] for i, task in enumerate(TASKS)}
        sides = {
            "plain checkpoint": lambda: plain.generate(**batch, pad_token_id=2, **OPTIONS),
            "task given": lambda: model.generate(rows, task="a", **OPTIONS),
            "task given, hot set": lambda: cached.generate(rows, task="a", **OPTIONS),
            "routed": lambda: model.generate(rows, **OPTIONS),
            "plain, four batches of two": lambda: [plain.generate(**{k: v[i : i + 2] for k, v in batch.items()},
                                                                  pad_token_id=2, **OPTIONS) for i in (0, 2, 4, 6)],
            "four sets of two": lambda: [model.generate(part, task=task, **OPTIONS) for task, part in groups.items()],
        }  # fmt: skip
        found = medians(sides, repeats)
    print("| case | CPU seconds | times the plain checkpoint |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {seconds:.2f} | {seconds / found['plain checkpoint']:.2f} |")


if __name__ == "__main__":
    main()
