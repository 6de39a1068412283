"""What an evaluation of many rows holds: `python benchmarks/eval_memory.py [--rows 1000000]`.

Three tasks, or `--tasks 1`, in a Parquet file each. Rows are read, spooled, shuffled, scored and written as in
`mass eval --report`; only the answers are drawn at random, for a model would take an hour, and holds one batch whatever the
number of rows. Prints the peak of the process and exits with 1 if it is over the bound.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import yaml
from pyarrow import parquet

import massmerge as mm
from massmerge.cli.demo.example import make_example
from massmerge.errors import InputError
from massmerge.model.answers import Prediction, Routing

MOST = 1000.0  # megabytes
RIGHT = 0.9  # of the inputs are routed to their task, and of these are given their label
_GROUP = 50_000  # rows that are written at a time


def peak() -> float:
    """The most memory that this process has held, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def write_rows(folder: Path, labels: dict[str, tuple[str, ...]], count: int) -> Path:
    """A table for each task, whose texts begin with task and label; returns the suite."""
    schema = pyarrow.schema({"text": pyarrow.string(), "label": pyarrow.string()})
    tasks = {}
    for number, (task, names) in enumerate(labels.items()):
        share = range(number, count, len(labels))
        with parquet.ParquetWriter(folder / f"{task}.parquet", schema) as writer:
            for at in range(0, len(share), _GROUP):
                given = [names[row // len(labels) % len(names)] for row in share[at : at + _GROUP]]
                texts = [
                    f"{task} {name} is what row {row} is about" for name, row in zip(given, share[at:], strict=False)
                ]
                writer.write_table(pyarrow.table({"text": texts, "label": given}, schema))
        tasks[task] = {"data": f"{task}.parquet", "input": "text"}
    (folder / "suite.yaml").write_text(yaml.safe_dump({"tasks": tasks}), encoding="utf-8")
    return folder / "suite.yaml"


def drawn_answers(labels: dict[str, tuple[str, ...]], every: list[str]) -> Any:
    """What takes the place of `Model.stream`."""
    draw = random.Random(0)

    def stream(items: Iterable[Any], *, task: str | None = None, **options: Any) -> Iterator[Prediction]:
        for item in items:
            if isinstance(item, InputError):
                yield Prediction(None, error=str(item))
                continue
            own, label = str(item).split(" ", 2)[:2]
            chosen = task or (own if draw.random() < RIGHT else draw.choice(every))
            given = label if chosen == own and draw.random() < RIGHT else draw.choice(labels[chosen])
            numbers = {name: draw.random() for name in every}
            routing = Routing(numbers, numbers, [chosen], "M0.mean", probabilities=numbers)
            timings = {"first pass": 1.0, "second pass": 1.0, "inputs": 32}
            yield Prediction(chosen, given, draw.random(), confidence=draw.random(), routing=routing, timings=timings)

    return stream


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tasks", type=int, choices=[1, 2, 3], default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = mm.load(mm.merge(make_example(folder / "example"), folder / "bundle"))
        labels = dict(list(model.labels.items())[: options.tasks])
        suite = write_rows(folder, labels, options.rows)
        model.stream = drawn_answers(dict(model.labels), model.tasks)  # type: ignore[method-assign]
        before, began = peak(), time.process_time()
        found = mm.evaluate(model, suite, report=folder / "report")
        assert sum(task.rows for task in found.tasks) == options.rows
        spent, most = time.process_time() - began, peak()
        size = (folder / "report" / "predictions.parquet").stat().st_size / 1e6
    print(json.dumps({
        "rows": options.rows, "tasks": options.tasks, "MB before": round(before), "MB at most": round(most),
        "MB of answers": round(size), "processor seconds": round(spent), "strict": found.means["strict"].value,
    }))  # fmt: skip
    return 0 if most <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
