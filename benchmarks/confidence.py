"""How far confidence can be trusted, and how well inputs of no task are told from a bundle's own.

    python -m benchmarks.confidence fit BUNDLE SUITE [--split validation] [--limit 300]
    python -m benchmarks.confidence table BUNDLE SUITE DATA [--count 0 16] [--split test] [--limit 100]

`fit` finds the constants of `routing/confidence.py` for routing without data, on validation rows: of the text suite's core
tasks, and of the image tasks that are not among the core tasks. `table` prints a line of JSON for each number of inputs per
task that the bundle is calibrated on: calibration error and accuracy of the surest answers over all rows of a split, and how
well each evidence tells own from foreign inputs (AUROC; `--limit` rows per task and kind). DATA has a folder for each task
with `train.parquet`. Inputs of a task are foreign to the bundle without it: only the other tasks are allowed, for known and
foreign inputs alike.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import massmerge as mm
from benchmarks.foreign_inputs import foreign_images, foreign_texts
from massmerge.bundle.reader import Bundle
from massmerge.evaluation.evaluate import evaluate
from massmerge.evaluation.prepared import prepare_evaluation
from massmerge.io.rows import read_inputs
from massmerge.model.calibrate import calibrate
from massmerge.model.limits import fit_rule
from massmerge.routing.confidence import data_free_rule, fit_confidence, log_odds, sigmoid

Evidence = Callable[[mm.Prediction], float | None]
EVIDENCE: dict[str, Evidence] = {
    "confidence": lambda p: p.confidence,
    "confidence of the task": lambda p: p.routing and p.routing.confidence,
    "agreement": lambda p: p.routing and p.routing.agreement,
    "lift": lambda p: p.routing and p.routing.lift,
    "typicality": lambda p: p.routing and p.routing.typicality,
}


def rows_of(bundle: Path, suite: Path, split: str, limit: int | None) -> dict[str, list[tuple[Any, str]]]:
    """Inputs of each task with their labels."""
    ready = prepare_evaluation(bundle, suite, split=split, limit=limit, seed=0)
    found = {}
    for task, data in ready.data.items():
        data.read_inputs()
        found[task] = list(zip(data.inputs, data.labels, strict=True))
    return found


def fit(given: argparse.Namespace) -> dict[str, float]:
    """Constants for routing without data, on the rows of a suite."""
    model = mm.load(given.bundle, router="projection")
    rows = rows_of(given.bundle, given.suite, given.split, given.limit)
    start = data_free_rule(images=model.takes_images)
    routings, right, heads, hits = [], [], [], []
    for task, pairs in rows.items():
        items = [item for item, _ in pairs]
        for routing in model.route(items):
            # Back to plain evidence, which is what `fit_rule` takes.
            lead = (log_odds(routing.confidence or 0.0) - start.offset) / start.lead
            routings.append(
                mm.Routing({}, {}, [routing.selected[0]], "", probabilities={routing.selected[0]: sigmoid(lead)})
            )
            right.append(routing.selected[0] == task)
        for answer, (_, label) in zip(model.predict(items, task=task), pairs, strict=True):
            heads.append(log_odds(answer.score or 0.0))
            hits.append(answer.label == label)
    rule = fit_rule(start, routings, right)
    offset, slope = fit_confidence(torch.tensor(heads), torch.tensor(hits))
    found = {"offset": rule.offset, "lead": rule.lead, "label_offset": offset, "label": slope}
    return {name: round(value, 3) for name, value in found.items()} | {"rows": len(right)}


def auroc(known: Sequence[float], foreign: Sequence[float]) -> float:
    """The probability that a known input has more of an evidence than a foreign one; ties count half."""
    k, f = torch.tensor(known), torch.tensor(foreign)
    return float(((k[:, None] > f).float() + (k[:, None] == f).float() / 2).mean())


def told_apart(known: Sequence[mm.Prediction], foreign: Sequence[mm.Prediction]) -> dict[str, float]:
    """AUROC of each evidence that there is."""
    found = {}
    for name, evidence in EVIDENCE.items():
        values = [[evidence(p) for p in side] for side in (known, foreign)]
        if all(value is not None for side in values for value in side):
            found[name] = auroc(*([float(v) for v in side if v is not None] for side in values))
    return found


def foreign_table(bundle: Path, suite: Path, split: str, limit: int) -> dict[str, dict[str, float]]:
    """AUROC of each evidence, for each kind of foreign inputs, and the mean over the kinds."""
    model = mm.load(bundle)
    own = {task: [item for item, _ in pairs] for task, pairs in rows_of(bundle, suite, split, limit).items()}
    everything = [item for items in own.values() for item in items]
    known = model.predict(everything)
    kinds = foreign_images(limit) if model.takes_images else foreign_texts([str(x) for x in everything], limit)
    found = {kind: told_apart(known, model.predict(items)) for kind, items in kinds.items()}
    left_out = []
    for task in own:
        others = [name for name in own if name != task]
        mine = model.predict([item for name in others for item in own[name]], task=others)
        left_out.append(told_apart(mine, model.predict(own[task], task=others)))
    found["inputs of left-out tasks"] = _mean(left_out)
    found["mean"] = _mean(list(found.values()))
    return {kind: {name: round(value, 4) for name, value in row.items()} for kind, row in found.items()}


def _mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def table(given: argparse.Namespace, count: int, copy: Path) -> dict[str, Any]:
    """All figures of one rung."""
    shutil.copytree(given.bundle, copy)
    bundle, kind = Bundle(copy, check=False), "projection"
    if count:
        inputs = {
            task.name: (
                row.item
                for row in read_inputs(
                    [str(given.data / task.name / "train.parquet")], image=bundle.takes_images, column=given.column
                )
            )
            for task in bundle.tasks
        }
        kind = calibrate(copy, inputs, count=count).kind
    result = evaluate(copy, given.suite, split=given.split, limit=given.rows, oracle=False)
    found = result.reliability
    assert found is not None
    return {
        "count": count,
        "kind": kind,
        "calibration_error": round(found.calibration_error, 4),
        "accuracy_at": found.accuracy_at,
        "normalised_at": found.normalised_at,
        "auroc": foreign_table(copy, given.suite, given.split, given.limit),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fit", "table"))
    parser.add_argument("bundle", type=Path)
    parser.add_argument("suite", type=Path)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--count", type=int, nargs="+", default=[0, 16])
    parser.add_argument("--split")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--rows", type=int, help="rows of each task for the calibration error; all by default")
    parser.add_argument("--column")
    given = parser.parse_args()
    given.split = given.split or ("validation" if given.what == "fit" else "test")
    if given.what == "fit":
        print(json.dumps(fit(given)))
        return
    given.column = given.column or ("image" if Bundle(given.bundle, check=False).takes_images else "text")
    for count in given.count:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(table(given, count, Path(folder) / "bundle")), flush=True)


if __name__ == "__main__":
    main()
