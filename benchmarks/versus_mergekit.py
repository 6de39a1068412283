"""Static merges against mergekit's: `python benchmarks/versus_mergekit.py [--methods average ties] [--repeats 3]`.

Both commands merge the same four full experts of a Llama of 100 M parameters, in turns, each in a process of its own whose
time and peak memory the operating system reports. mergekit has an environment of its own, made once in the cache beside the
models. Weights are random: they do not matter to the cost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from importlib.metadata import version
from pathlib import Path

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from vit_b32 import cache_folder

MERGEKIT = "0.1.5"
TIME, MEMORY = 1.0, 0.33
"""Bounds: ours, as a share of mergekit's."""
EXPERTS = 4
# Our options, and mergekit's name and options of each model for the same merge.
METHODS: dict[str, tuple[dict[str, object], str, dict[str, float]]] = {
    "task_arithmetic": ({"scale": 0.3}, "task_arithmetic", {"weight": 0.3}),
    "average": ({}, "linear", {"weight": 1.0}),
    "ties": ({"scale": 1.0, "keep": 0.2}, "ties", {"weight": 1.0, "density": 0.2}),
}
Run = dict[str, float]


def environment(folder: Path) -> Path:
    """The command of mergekit, in an environment with the libraries of this one; installed once."""
    command = folder / "bin" / "mergekit-yaml"
    if not command.is_file():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet"]
        pins = [
            f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers", "numpy", "safetensors")
        ]
        # torch first, so that what mergekit asks for is there and nothing brings another.
        subprocess.run([*pip, pins[0]], check=True)
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(pins), encoding="utf-8")
        subprocess.run([*pip, "-c", str(constraints), f"mergekit=={MERGEKIT}"], check=True)
    return command


def make_models(folder: Path) -> None:
    """Write the base and its experts once."""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=640, intermediate_size=1728, num_hidden_layers=16, num_attention_heads=10,
        num_key_value_heads=10, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    for number, name in enumerate(["base", *(f"expert{i}" for i in range(EXPERTS))]):
        if (folder / name / "config.json").is_file():
            continue
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters() if number else ():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 1e-3)
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            model.save_pretrained(draft)
            shutil.copytree(draft, folder / name, dirs_exist_ok=True)


def write_recipes(models: Path, folder: Path, method: str) -> tuple[Path, Path]:
    """The same merge as a recipe of ours and as one of mergekit's."""
    options, name, own = METHODS[method]
    experts = [str(models / f"expert{i}") for i in range(EXPERTS)]
    tasks = [{"name": f"task{i}", "expert": expert} for i, expert in enumerate(experts)]
    ours = {"base": str(models / "base"), "tasks": tasks, "merge": {"method": method, **options}}
    theirs: dict[str, object] = {
        "merge_method": name,
        "models": [{"model": expert, "parameters": own} for expert in experts],
        "dtype": "float32",
    }
    if name != "linear":
        theirs |= {"base_model": str(models / "base"), "parameters": {"normalize": name == "ties"}}
    paths = folder / f"{method}-mass.yaml", folder / f"{method}-mergekit.yaml"
    for path, data in zip(paths, (ours, theirs), strict=True):
        path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return paths


def measure(command: list[str], out: Path) -> Run:
    """Run a command to its end; seconds of the clock and of the processors, and bytes at the peak."""
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    # The peak of a child begins with what the process that started it holds, so a small one starts it.
    starter = (
        "import os, sys; p = os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:]); _, code, used = os.wait4(p, 0); "
        "print('used', code, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", starter, *command, str(out)], capture_output=True, text=True, env=offline
    )
    seconds = time.perf_counter() - began
    found = re.search(r"^used (\d+) (\S+) (\d+)$", done.stdout, re.MULTILINE)
    if found is None or found[1] != "0" or not (out / "model.safetensors").is_file():
        sys.exit(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    return {"seconds": seconds, "processor": float(found[2]), "peak": float(found[3])}


def compare(method: str, models: Path, mergekit: Path, repeats: int) -> dict[str, Run]:
    """Medians of both sides, which run in turns."""
    runs: dict[str, list[Run]] = {"mass": [], "mergekit": []}
    with tempfile.TemporaryDirectory(dir=models) as name:
        folder = Path(name)
        ours, theirs = write_recipes(models, folder, method)
        commands = {
            "mass": [str(Path(sys.executable).with_name("mass")), "merge", "--quiet", str(ours)],
            "mergekit": [str(mergekit), "--quiet", "--no-copy-tokenizer", str(theirs)],  # the models have none
        }
        for turn in range(repeats):
            for side in ("mass", "mergekit") if turn % 2 else ("mergekit", "mass"):
                runs[side].append(measure(commands[side], folder / side))
                print(method, side, runs[side][-1], file=sys.stderr, flush=True)
    return {
        side: {name: statistics.median(run[name] for run in all_) for name in all_[0]} for side, all_ in runs.items()
    }


def faults(method: str, found: dict[str, Run]) -> list[str]:
    """The bounds that a method misses."""
    time_share, memory = (found["mass"][name] / found["mergekit"][name] for name in ("seconds", "peak"))
    missed = []
    if time_share > TIME:
        missed.append(f"{method}: {time_share:.2f} times mergekit's time, more than {TIME}")
    if memory > MEMORY:
        missed.append(f"{method}: {memory:.2f} times mergekit's memory, more than {MEMORY}")
    return missed


def main() -> None:
    """Measure, print, and fail where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = cache_folder() / "versus_mergekit"
    folder.mkdir(exist_ok=True)
    mergekit = environment(folder / "environment")
    make_models(folder)
    rows = {method: compare(method, folder, mergekit, options.repeats) for method in options.methods}
    missed = [fault for method, found in rows.items() for fault in faults(method, found)]
    if options.json:
        print(json.dumps({"rows": rows, "faults": missed}, indent=2))
    else:
        for method, found in rows.items():
            for side, run in found.items():
                print(
                    f"{method:<16} {side:<9} {run['seconds']:6.1f} s  {run['processor']:6.1f} s of processor  "
                    f"{run['peak'] / 1e6:6.0f} MB"
                )
        print("\n".join(missed) or "all bounds hold")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
