"""Memory, size and time of merges at ViT-B/32 size: `python benchmarks/merge_cost.py [--tasks 4 20] [--method ties]`.

Each merge runs in a process of its own, whose peak resident memory the operating system reports.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from massmerge import Bundle
from massmerge.merging.static import KEEPING_METHODS, STATIC_METHODS
from vit_b32 import make_recipe

_CHILD = """
import resource, sys, time
import massmerge as mm
began = time.perf_counter()
mm.merge(sys.argv[1], sys.argv[2])
print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def measure(tasks: int, method: str | None) -> dict[str, float]:
    """Merge that many experts in a new process, into a bundle or by a static method."""
    recipe = make_recipe(tasks)
    with tempfile.TemporaryDirectory(dir=recipe.parent) as folder:
        out = Path(folder) / "out"
        if method:
            data = yaml.safe_load(recipe.read_text())
            recipe = recipe.with_name(f"{Path(folder).name}.yaml")
            recipe.write_text(yaml.safe_dump({**data, "merge": {"method": method}}))
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, str(recipe), str(out)], check=True, capture_output=True, text=True
        )
        seconds, peak = map(float, child.stdout.split())
        if method:
            recipe.unlink()
            manifest = json.loads((out / "mass.json").read_text())
            base, size = manifest["base"]["bytes"], manifest["needed_bytes"]
        else:
            bundle = Bundle(out, check=False)
            base, size = bundle.base_bytes, bundle.counted_bytes
    return {"tasks": tasks, "seconds": seconds, "peak": peak, "base": base, "bytes": size}


def main() -> None:
    """Measure, print, and fail where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, nargs="+", default=[4, 8, 14, 20])
    parser.add_argument(
        "--method", choices=(*STATIC_METHODS, *KEEPING_METHODS), help="a static merge instead of a bundle"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(tasks, options.method) for tasks in options.tasks]
    faults = []
    for row in rows:
        if not options.method and row["bytes"] > 2.0 * row["base"]:
            faults.append(f"{row['tasks']} tasks: {row['bytes'] / row['base']:.4f} times the base, more than 2.00")
        if row["peak"] > 3.5 * row["base"] + 600e6:
            faults.append(f"{row['tasks']} tasks: peak {row['peak'] / 1e6:.0f} MB, more than 3.5 × base + 600 MB")
    if rows[-1]["peak"] > 1.1 * rows[0]["peak"]:
        growth = rows[-1]["peak"] / rows[0]["peak"] - 1
        faults.append(f"peak grows by {growth:.0%} from {rows[0]['tasks']} to {rows[-1]['tasks']} tasks")
    if options.json:
        print(json.dumps({"rows": rows, "faults": faults}, indent=2))
    else:
        print(f"{'tasks':>5} {'seconds':>8} {'peak MB':>8} {'of bound':>8} {'bytes / base':>14}")
        for row in rows:
            bound = 3.5 * row["base"] + 600e6
            print(
                f"{row['tasks']:>5.0f} {row['seconds']:>8.1f} {row['peak'] / 1e6:>8.0f} {row['peak'] / bound:>8.2f} "
                f"{row['bytes'] / row['base']:>14.4f}"
            )
        print("\n".join(faults) or "all bounds hold")
    sys.exit(bool(faults))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
