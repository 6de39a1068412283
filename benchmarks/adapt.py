"""What mixed inputs without names are worth: `python -m benchmarks.adapt BUNDLE SUITE DATA --count 100`.

A copy of the bundle is adapted to so many training rows of each task, shuffled and without names (`--uneven`: ten times as
many of the first task as of the others), and routes rows of a split with the router that `mass adapt` chose, with each of
the others, and without. DATA has a folder for each task with `train.parquet`. One line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from itertools import islice
from pathlib import Path

import torch

import massmerge as mm
from benchmarks.confidence import rows_of
from massmerge.io.rows import read_inputs
from massmerge.model.adapt import WAYS, adapt
from massmerge.model.estimate import decided, estimate
from massmerge.model.seen import look_at
from massmerge.routing.adapted import AdaptedRouter, fit_adapted
from massmerge.routing.routers import find_router


def traffic(model: mm.Model, data: Path, column: str, count: int, *, uneven: bool) -> list[object]:
    """Training rows of all tasks, shuffled."""
    found: list[object] = []
    for place, task in enumerate(model.tasks):
        rows = read_inputs([str(data / task / "train.parquet")], image=model.takes_images, column=column)
        wanted = count if place == 0 or not uneven else max(1, count // 10)
        found += [row.item for row in islice(rows, wanted)]
    random.Random(0).shuffle(found)
    return found


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("suite", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--column", default="text")
    given = parser.parse_args()
    model = mm.load(given.bundle, router="projection")
    inputs = traffic(model, given.data, given.column, given.count, uneven=given.uneven)
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(given.bundle, Path(folder) / "bundle")
        done = adapt(copy, inputs, count=len(inputs))
    rows = rows_of(given.bundle, given.suite, given.split, given.limit)
    owners = torch.tensor([model.tasks.index(task) for task, pairs in rows.items() for _ in pairs])
    asked = list(look_at(model, {task: [item for item, _ in pairs] for task, pairs in rows.items()}, lambda _: None))
    seen = list(look_at(model, {"inputs": inputs}, lambda _: None))

    def accuracy(way: str | None) -> float:
        routers = [
            find_router("projection").load(look.names, {}, look.subspaces)
            if way is None
            else AdaptedRouter(fit_adapted(look.activations, look.subspaces, **WAYS[way]), look.subspaces)
            for look in seen
        ]
        routings = decided(model.stages, asked, routers, torch.arange(len(owners)))
        return round(100 * estimate(model.tasks, owners, routings).mean.value, 1)

    found = {way or "none": accuracy(way) for way in (None, *WAYS)}
    print(json.dumps({"inputs": len(inputs), "rows": len(owners), "chosen": done.way, "routing accuracy": found}))


if __name__ == "__main__":
    main()
