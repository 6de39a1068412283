"""Adding a task to a bundle at ViT-B/32 size, against merging all experts again: `python benchmarks/add_cost.py`.

Both ways run in turns in one process, and medians are compared; so is what the two bundles keep of the experts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import massmerge as mm
from massmerge.linalg.factors import Factors
from massmerge.merging.change import Addition
from massmerge.merging.open_recipe import open_recipe
from massmerge.merging.originals import Originals
from vit_b32 import make_recipe

MOST_ERROR = 1e-4  # what merges hold themselves to


def measure(tasks: int, repeats: int) -> dict[str, float]:
    """Seconds of either way to a bundle of that many tasks, and how much less the second keeps of the experts."""
    whole, part = mm.Recipe.load(make_recipe(tasks)), mm.Recipe.load(make_recipe(tasks - 1))
    new, folder = Addition(tasks=whole.tasks[-1:]), make_recipe(tasks).parent
    times: dict[str, list[float]] = {"merge": [], "add": []}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        before, merged, added = (Path(place) / name for name in ("before", "merged", "added"))
        mm.merge(part, before, folder=folder)
        for _ in range(repeats):
            began = time.perf_counter()
            mm.merge(whole, merged, folder=folder, overwrite=True)
            times["merge"].append(time.perf_counter() - began)
            began = time.perf_counter()
            mm.add(before, new, out=added, folder=folder, overwrite=True)
            times["add"].append(time.perf_counter() - began)
        error = excess(whole, folder, mm.Bundle(merged), mm.Bundle(added))
    merge_s, add_s = (statistics.median(times[way]) for way in ("merge", "add"))
    return {"tasks": tasks, "merge s": merge_s, "add s": add_s, "ratio": merge_s / add_s, "error": error}


def excess(recipe: mm.Recipe, folder: Path, merged: mm.Bundle, added: mm.Bundle) -> float:
    """How much further than the merge's an added bundle's update is from the expert's, at most, as a share of the latter.

    Infinite where it has a lower rank. Updates of the two may differ by more, where singular values at the cut are nearly
    equal and either choice is as good.
    """
    prepared = open_recipe(recipe, folder, download=False)
    originals, worst = Originals(prepared), 0.0
    for tensor in prepared.plan.matrices:
        base = originals.base(tensor.name)
        for position, task in enumerate(originals.tasks):
            rank = merged.ranks[tensor.name][position]
            ours, theirs = added.factors(task, tensor.name), merged.factors(task, tensor.name)
            if added.ranks[tensor.name][position] < rank:
                return float("inf")
            if ours is not None and theirs is not None:
                delta = originals.delta(tensor, task, base)
                cut = Factors(ours.u[:, :rank], ours.s[:rank], ours.v[:rank]).dense()
                squares = (float((update - delta).double().square().sum()) for update in (cut, theirs.dense()))
                worst = max(worst, max(0.0, next(squares) - next(squares)) / float(delta.double().square().sum()))
    return worst**0.5


def main() -> None:
    """Measure, print, and fail where adding keeps less than a merge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, nargs="+", default=[8, 20])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for tasks in options.tasks:
        rows.append(row := measure(tasks, options.repeats))
        if not options.json:
            print(
                f"{tasks} tasks: merge {row['merge s']:.1f} s, add {row['add s']:.1f} s, {row['ratio']:.2f} times faster; "
                f"adding keeps at most {row['error']:.1e} less of an update",
                flush=True,
            )
    faults = [
        f"{row['tasks']} tasks: adding keeps {row['error']:.1e} less of an update"
        for row in rows
        if row["error"] > MOST_ERROR
    ]
    print(
        json.dumps({"rows": rows, "faults": faults}, indent=2)
        if options.json
        else "\n".join(faults) or "both keep as much"
    )
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
