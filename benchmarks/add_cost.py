"""Adding a task to a bundle at ViT-B/32 size, against merging all experts again: `python benchmarks/add_cost.py`.

Both ways run in turns in one process, and medians are compared; then the two bundles are, matrix by matrix.
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
from massmerge.changing import Addition
from massmerge.linalg import Factors
from vit_b32 import make_recipe

MOST_ERROR = 1e-4  # what merges hold themselves to


def measure(tasks: int, repeats: int) -> dict[str, float]:
    """Seconds of either way to a bundle of that many tasks, and how far their updates are apart."""
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
        error = distance(mm.Bundle(merged), mm.Bundle(added))
    merge_s, add_s = (statistics.median(times[way]) for way in ("merge", "add"))
    return {"tasks": tasks, "merge s": merge_s, "add s": add_s, "ratio": merge_s / add_s, "error": error}


def distance(merged: mm.Bundle, added: mm.Bundle) -> float:
    """The largest difference of an update, relative to its size; infinite where adding has kept less.

    It may have kept a little more: of a bundle's tasks it is known which tensors they leave as they are, which leaves room.
    """
    worst = 0.0
    for name, ranks in merged.ranks.items():
        for task, rank, other in zip(merged.tasks, ranks, added.ranks[name], strict=True):
            if other < rank:
                return float("inf")
            ours, theirs = added.factors(task.name, name), merged.factors(task.name, name)
            if ours is not None and theirs is not None:
                update = theirs.dense()
                cut = Factors(ours.u[:, :rank], ours.s[:rank], ours.v[:rank]).dense()
                worst = max(worst, float((cut - update).norm() / update.norm()))
    return worst


def main() -> None:
    """Measure, print, and fail where the two ways do not agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, nargs="+", default=[8, 20])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(tasks, options.repeats) for tasks in options.tasks]
    faults = [
        f"{row['tasks']} tasks: updates differ by {row['error']:.1e}" for row in rows if row["error"] > MOST_ERROR
    ]
    if options.json:
        print(json.dumps({"rows": rows, "faults": faults}, indent=2))
    else:
        for row in rows:
            print(
                f"{row['tasks']} tasks: merge {row['merge s']:.1f} s, add {row['add s']:.1f} s, {row['ratio']:.2f} times "
                f"faster; updates differ by at most {row['error']:.1e}"
            )
        print("\n".join(faults) or "both ways agree")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
