"""What a bundle's routing reaches with no inputs, and with some unlabelled inputs a task to calibrate on.

    python benchmarks/ladder.py BUNDLE SUITE DATA --count 0 16 64 400 [--split validation] [--limit 200] [--kind auto]

DATA has a folder for each task with `train.parquet`, whose first rows the router is fitted on; SUITE's rows are what it is
measured on. One line of JSON for each count.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

from massmerge.bundle.reader import Bundle
from massmerge.evaluation.evaluate import evaluate
from massmerge.io.rows import read_inputs
from massmerge.model.calibrate import KINDS, calibrate


def main() -> None:
    """Measure each rung."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("suite", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--count", type=int, nargs="+", default=[0, 16, 64, 400])
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--kind", choices=KINDS, default="auto")
    parser.add_argument("--column", default="text")
    given = parser.parse_args()
    for count in given.count:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(given, count, Path(folder) / "bundle")), flush=True)


def measure(given: argparse.Namespace, count: int, copy: Path) -> dict[str, object]:
    """The figures of one rung."""
    shutil.copytree(given.bundle, copy)
    bundle = Bundle(copy, check=False)
    began, found = time.perf_counter(), {"count": count, "kind": bundle.router_kind}
    if count:
        paths = {task.name: str(given.data / task.name / "train.parquet") for task in bundle.tasks}
        inputs = {
            task: (row.item for row in read_inputs([path], image=bundle.takes_images, column=given.column))
            for task, path in paths.items()
        }
        done = calibrate(copy, inputs, kind=given.kind, count=count)
        found |= {"kind": done.kind, "expected": done.after and round(done.after.mean.value, 4)}
    found["calibration_seconds"] = round(time.perf_counter() - began, 1)
    result = evaluate(copy, given.suite, split=given.split, limit=given.limit, oracle=False)
    return found | {name: round(mean.value, 4) for name, mean in result.means.items()}


if __name__ == "__main__":
    main()
