"""What sessions are worth: `python -m benchmarks.sessions BUNDLE SUITE --sizes 1 4 8`.

The rows of each task are shuffled and cut into sessions of one task. All inputs of all sessions go through `predict` in one
call, each with the key of its session; size 1 is the model without sessions. With `--calls` each input is a call of its own,
so that an input knows only those before it, as in the service.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import massmerge as mm
from massmerge.evaluation.prepared import prepare_evaluation

Row = tuple[str, str, str, object]
"""Task, label, session, input."""


def sessions_of(bundle: Path, suite: Path, split: str, limit: int | None, size: int, seed: int) -> list[Row]:
    """The rows of a suite, cut into sessions of one task; sessions of all tasks are mixed."""
    ready = prepare_evaluation(bundle, suite, split=split, limit=limit, seed=seed)
    draw = random.Random(seed)
    found = []
    for task, data in ready.data.items():
        data.read_inputs()
        order = list(range(len(data)))
        draw.shuffle(order)
        rows = [(task, data.labels[i], f"{task}-{at // size}", data.inputs[i]) for at, i in enumerate(order)]
        found += [rows[at : at + size] for at in range(0, len(rows), size)]
    draw.shuffle(found)
    return [row for session in found for row in session]


def answers(model: mm.Model, rows: Sequence[Row], *, calls: bool) -> list[mm.Prediction]:
    """What the model answers, knowing the sessions."""
    if not calls:
        return model.predict([row[3] for row in rows], session=[row[2] for row in rows])
    memory = mm.Sessions()
    return [model.predict([row[3]], session=row[2], memory=memory)[0] for row in rows]


def figures(rows: Sequence[Row], found: Sequence[mm.Prediction], references: dict[str, float]) -> dict[str, float]:
    """Routing accuracy, accuracy and normalised accuracy in per cent: means over tasks."""
    routed, right, normal = [], [], []
    for task, reference in references.items():
        own = [(row, p) for row, p in zip(rows, found, strict=True) if row[0] == task]
        routed.append(sum(p.task == task for _, p in own) / len(own))
        right.append(sum((p.task, p.label) == row[:2] for row, p in own) / len(own))
        normal.append(right[-1] / reference)
    means = {"routing": routed, "accuracy": right, "normalised": normal}
    return {name: round(100 * sum(values) / len(values), 2) for name, values in means.items()}


def main() -> None:
    """Measure, and print a line of JSON for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--calls", action="store_true", help="one call for each input")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = mm.load(options.bundle)
    suite = mm.Suite.load(options.suite)
    references = {name: float(task.reference_of(options.split)) for name, task in suite.tasks.items()}
    for size in options.sizes:
        rows = sessions_of(options.bundle, options.suite, options.split, options.limit, size, options.seed)
        found = answers(model, rows, calls=options.calls)
        print(json.dumps({"size": size, "rows": len(rows), **figures(rows, found, references)}), flush=True)


if __name__ == "__main__":
    main()
