"""What smaller factors cost: `python -m benchmarks.factor_sizes RECIPE SUITE FOLDER base:2.0 float16:1.5 int8:1.25`.

Merges the recipe's experts once for each way to store factors and its budget, and answers the same rows with every bundle.
It prints a line of JSON for each: size, the range of ranks, normalised accuracy routed and with the task given, seconds to
load and to answer, and the memory that is resident afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import massmerge as mm
from massmerge.recipe import MergeOptions


def bundle_of(recipe: Path, folder: Path, factors: str, budget: float) -> Path:
    """A bundle with the recipe's tasks; merged once and kept."""
    given = mm.Recipe.load(recipe)
    options = MergeOptions.model_validate({**given.merge.own(), "rank": None, "factors": factors, "budget": budget})
    out = folder / f"{factors}-{budget}"
    return mm.merge(given.model_copy(update={"merge": options}), out, folder=recipe.resolve().parent, workers=1)


def measure(bundle: Path, suite: Path, limit: int | None, split: str) -> dict[str, object]:
    """Figures of one bundle; in a process of its own, for the sake of the memory."""
    start = time.perf_counter()
    model = mm.load(bundle, check=False)
    loaded = time.perf_counter() - start
    found = mm.evaluate(model, suite, split=split, limit=limit, oracle=True)
    about = mm.inspect(bundle)
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    resident = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in status if "Rss" in line}
    normal = {name: round(100 * mean.value, 2) for name, mean in found.means.items() if name.startswith("normalised")}
    return {
        "bundle": bundle.name, "times_the_base": round(about.ratio, 3),
        "ranks": [min(t.rank_low for t in about.tasks), max(t.rank_high for t in about.tasks)],
        "energy": round(sum(t.energy for t in about.tasks) / len(about.tasks), 3), **normal,
        "load_seconds": round(loaded, 2), "rows": len(found.results),
        "timings": {name: round(value, 2) for name, value in found.timings.items()}, "resident_mb": resident,
    }  # fmt: skip


def main() -> None:
    """Merge, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("suite", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+", help="how factors are stored and the budget, such as int8:1.25")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--split", default="test")
    options = parser.parse_args()
    for case in options.cases:
        factors, _, budget = case.partition(":")
        out = bundle_of(options.recipe, options.folder, factors, float(budget))
        if len(options.cases) == 1:
            print(json.dumps(measure(out, options.suite, options.limit, options.split)), flush=True)
            continue
        again = [*sys.argv[1:4], case, "--split", options.split]
        again += ["--limit", str(options.limit)] if options.limit else []
        subprocess.run([sys.executable, "-m", "benchmarks.factor_sizes", *again], check=True)


if __name__ == "__main__":
    main()
