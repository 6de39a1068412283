"""Which sets a mixed stream selects: `python -m benchmarks.stream_sets` writes `stream_sets.json` for `answer_cost.py`.

Test rows of the eight image tasks, equally many of each, are routed by the bundle that `make suite-vision` has built, and
selected as in the paper: tasks of weight 0.2 or more, at most three. Only places of tasks are kept, not their names.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import Counter
from pathlib import Path

import torch
from PIL import Image

import massmerge as mm
from benchmarks.suites.fetch import cache_root
from benchmarks.suites.splits import read_split
from massmerge.routing.selection import select

PATH = Path(__file__).with_name("stream_sets.json")
THRESHOLD, MOST = 0.2, 3


def measured_sets(rows: int) -> Counter[tuple[int, ...]]:
    """How often each set is selected; a set is known by its tasks' places in order of weight."""
    suite = cache_root() / "vision"
    model = mm.load(suite / "bundles" / "core")
    found: Counter[tuple[int, ...]] = Counter()
    for task in model.tasks:
        pictures, _ = read_split(suite / "data" / task, "test", "image")
        opened = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures[:rows]]
        weights = torch.tensor([[routing.weights[name] for name in model.tasks] for routing in model.route(opened)])
        found.update(map(tuple, select(weights, THRESHOLD, MOST)))
    return found


def main() -> None:
    """Route, count, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=60, help="of each task")
    found = measured_sets(parser.parse_args().rows)
    data = [{"tasks": tasks, "inputs": count} for tasks, count in found.most_common()]
    PATH.write_text(json.dumps(data) + "\n", encoding="utf-8")
    print(f"{PATH}: {len(found)} sets of {found.total()} inputs")


if __name__ == "__main__":
    main()
