"""Put adapters of SmolLM2 into the package, for `mass demo --llm`: `python benchmarks/demo_llm_adapters.py`.

In float16, which halves them. Only tasks whose data may be shared are taken.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.suites.llm.experts import expert_folder
from benchmarks.suites.llm.tasks import TASKS

CARRIED = ("spam", "sentiment", "kind", "title")
TARGET = Path(__file__).parents[1] / "src/massmerge/cli/demo/llm_data"


def main() -> None:
    """Write the adapters, the recipe and what is known of them."""
    shutil.rmtree(TARGET / "experts", ignore_errors=True)
    about = {}
    for task in CARRIED:
        found, target = expert_folder(task, "chat"), TARGET / "experts" / task
        target.mkdir(parents=True)
        state = load_file(found / "adapter_model.safetensors")
        halves = {name: tensor.to(torch.float16).contiguous() for name, tensor in state.items()}
        save_file(halves, target / "adapter_model.safetensors", {"format": "pt"})
        shutil.copyfile(found / "adapter_config.json", target / "adapter_config.json")
        about[task] = json.loads((found / "metrics.json").read_text(encoding="utf-8")) | {
            "instruction": TASKS[task].instruction
        }
    (TARGET / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    tasks = "".join(f"  - name: {task}\n    expert: experts/{task}\n" for task in CARRIED)
    (TARGET / "recipe.yaml").write_text(f"base: base\ntasks:\n{tasks}", encoding="utf-8")


if __name__ == "__main__":
    main()
