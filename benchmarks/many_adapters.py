"""What a bundle of hundreds of adapters costs: `python benchmarks/many_adapters.py --adapters 200`.

A BERT of 6 blocks, 384 wide (`--base base`: 12 blocks, 768 wide), with random weights. Its LoRA adapters of rank 8
at queries and values have random numbers, and heads of their own. Load and first answer are measured in processes of
their own, in turns with those of the base alone, and medians are compared. Processor time is compared, which other
programs hardly affect; imports are not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from transformers import BertConfig, BertModel
from transformers.utils import logging

import massmerge as mm
from massmerge.model.route.decide import cast_votes

logging.disable_progress_bar()
RANK, LABELS, LENGTH, BATCH = 8, 3, 32, 32
MOST_ROUTING, MOST_FIRST = 0.05, 3.0  # of a first pass; times the base's, load included
TURNS = 5
SIZES = {"small": (6, 384), "base": (12, 768)}  # blocks and width


def config_of(size: str) -> BertConfig:
    """The configuration of a base."""
    blocks, width = SIZES[size]
    return BertConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=blocks,
        num_attention_heads=12,
        vocab_size=30522,
    )


def write_sources(folder: Path, count: int, config: BertConfig) -> Path:
    """A base, adapters of it, and their recipe."""
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder / "base")
    said = {"peft_type": "LORA", "task_type": "SEQ_CLS", "r": RANK, "lora_alpha": 2 * RANK}
    layers = [f"bert.encoder.layer.{i}.attention.self.{part}" for i in range(config.num_hidden_layers)
              for part in ("query", "value")]  # fmt: skip
    for number in range(count):
        place, width = folder / f"adapter{number}", config.hidden_size
        place.mkdir()
        (place / "adapter_config.json").write_text(json.dumps(said), encoding="utf-8")
        parts = {"lora_A": (RANK, width), "lora_B": (width, RANK)}
        shapes = {f"{name}.{part}.weight": shape for name in layers for part, shape in parts.items()}
        shapes |= {"classifier.weight": (LABELS, width), "classifier.bias": (LABELS,)}
        tensors = {f"base_model.model.{name}": 0.05 * torch.randn(shape) for name, shape in shapes.items()}
        save_file(tensors, place / "adapter_model.safetensors")
    tasks = [{"name": f"t{i}", "expert": f"adapter{i}"} for i in range(count)]
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump({"base": "base", "tasks": tasks, "merge": {"budget": 10.0}}), encoding="utf-8"
    )
    return folder / "recipe.yaml"


def inputs(count: int) -> dict[str, torch.Tensor]:
    """A batch of random words."""
    words = torch.randint(1000, 30522, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def resident() -> float:
    """Megabytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize() / 1e6


def spent(action: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """Processor seconds of an action, the least of some repeats, and what it gave."""
    times, result = [], None
    for _ in range(repeats):
        began = time.process_time()
        result = action()
        times.append(time.process_time() - began)
    return min(times), result


def base_alone(folder: Path) -> dict[str, float]:
    """Load and first pass of the base."""
    before, batch = resident(), inputs(1)
    load, model = spent(lambda: BertModel.from_pretrained(folder / "base").eval())
    with torch.inference_mode():
        first, _ = spent(lambda: model(**batch))
        later, _ = spent(lambda: model(**batch), 5)
    return {"load": load, "first": first, "later": later, "memory": resident() - before}


def bundle_alone(folder: Path) -> dict[str, float]:
    """Load and first answer of the bundle, and what routing takes beside a first pass."""
    before, batch = resident(), inputs(1)
    row = {name: tensor[0] for name, tensor in batch.items()}
    load, model = spent(lambda: mm.load(folder / "out", device="cpu", check=False))
    loaded = resident() - before
    first, _ = spent(lambda: model.predict([row]))
    later, _ = spent(lambda: model.predict([row]), 5)
    look, many = model.stages.first, inputs(BATCH)
    with torch.inference_mode():
        seeing, seen = spent(lambda: look.first_pass(many), 5)
        scoring, _ = spent(lambda: cast_votes(look.voters, seen, look.router), 5)
    answered = resident() - before
    return {"load": load, "first": first, "later": later, "loaded": loaded, "memory": answered} | {
        "first_pass": seeing, "routing": scoring,
    }  # fmt: skip


def apart(what: str, folder: Path) -> dict[str, float]:
    """A measurement in a process of its own, on one thread."""
    command = [sys.executable, __file__, "--measure", what, "--folder", str(folder)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def measure(count: int, size: str) -> bool:
    """Merge, then measure; whether the bounds hold."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        recipe = write_sources(folder, count, config_of(size))
        merged, _ = spent(lambda: mm.merge(recipe, folder / "out", workers=1))
        held = sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file())
        runs = [{what: apart(what, folder) for what in ("base", "bundle")} for _ in range(TURNS)]
    base, bundle = ({key: statistics.median(run[what][key] for run in runs) for key in runs[0][what]}
                    for what in ("base", "bundle"))  # fmt: skip
    share = bundle["routing"] / bundle["first_pass"]
    times = (bundle["load"] + bundle["first"]) / (base["load"] + base["first"])
    print(f"{count} adapters of a {size} BERT: merged in {merged:.1f} s, {held / 1e6:.0f} MB")
    for name, figures in (("base", base), ("bundle", bundle)):
        print(f"  {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    good = {"routing": share <= MOST_ROUTING, "first answer": times <= MOST_FIRST}
    print(
        f"  routing {100 * share:.1f} % of a first pass of {BATCH} inputs; load and first answer {times:.2f} x the base's, "
        f"the answer alone {bundle['first'] / base['first']:.2f} x"
    )
    print("  " + ", ".join(f"{name}: {'holds' if held else 'missed'}" for name, held in good.items()), flush=True)
    return all(good.values()) and math.isfinite(share)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, nargs="+", default=[200])
    parser.add_argument("--base", choices=list(SIZES), default="small")
    parser.add_argument("--measure", choices=["base", "bundle"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        found = base_alone(options.folder) if options.measure == "base" else bundle_alone(options.folder)
        print(json.dumps(found))
        return 0
    held = [measure(count, options.base) for count in options.adapters]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
