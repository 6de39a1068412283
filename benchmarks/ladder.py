"""What a bundle's routing reaches with no inputs, with some unlabelled inputs per task, and in the paper's setting.

    python -m benchmarks.ladder BUNDLE SUITE DATA --count 0 16 64 400 [--split validation] [--limit 200] [--kind auto]
    python -m benchmarks.ladder BUNDLE SUITE DATA --recipe RECIPE --out rungs.json

DATA has a folder for each task with `train.parquet`, whose first rows the router is fitted on; SUITE's rows are what it is
measured on. One line of JSON for each rung. With a recipe, its experts are also merged as the paper does it: rank 1/T, a
fixed model as first pass, routed at the input of the MLP at four fifths of its depth, up to three tasks per input.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

import massmerge as mm
from massmerge.bundle.reader import Bundle
from massmerge.evaluation.evaluate import evaluate
from massmerge.io.rows import read_inputs
from massmerge.model.calibrate import KINDS, calibrate

Rung = dict[str, Any]


def main() -> None:
    """Measure each rung."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("suite", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--count", type=int, nargs="*", default=[0, 16, 64, 400])
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--kind", choices=KINDS, default="auto")
    parser.add_argument("--recipe", type=Path, help="of the bundle's experts: the paper's setting is measured too")
    parser.add_argument("--out", type=Path, help="where all lines go together, as a list")
    given = parser.parse_args()
    found = []
    for count in [*given.count, *(["paper"] if given.recipe else [])]:
        with tempfile.TemporaryDirectory() as folder:
            rung = paper(given, Path(folder) / "bundle") if count == "paper" else measure(given, count, Path(folder))
        print(json.dumps(rung), flush=True)
        found.append(rung)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measure(given: argparse.Namespace, count: int, folder: Path) -> Rung:
    """The figures of one rung; the bundle is copied into the folder."""
    copy = folder / "bundle"
    shutil.copytree(given.bundle, copy)
    bundle = Bundle(copy, check=False)
    began, found = time.perf_counter(), {"count": count, "kind": bundle.router_kind}
    if count:
        column = "image" if bundle.takes_images else "text"
        paths = {task.name: str(given.data / task.name / "train.parquet") for task in bundle.tasks}
        inputs = {
            task: (row.item for row in read_inputs([path], image=bundle.takes_images, column=column))
            for task, path in paths.items()
        }
        done = calibrate(copy, inputs, kind=given.kind, count=count)
        found |= {"kind": done.kind, "expected": done.after and round(done.after.mean.value, 4)}
    found["calibration_seconds"] = round(time.perf_counter() - began, 1)
    return found | figures(copy, given)


def paper(given: argparse.Namespace, out: Path) -> Rung:
    """The figures of the paper's setting, merged into `out`."""
    recipe = mm.Recipe.load(given.recipe)
    mm.merge(in_papers_setting(recipe, given.recipe.parent), out, folder=given.recipe.resolve().parent)
    return {"count": 0, "kind": "paper"} | figures(out, given)


def in_papers_setting(recipe: mm.Recipe, folder: Path) -> mm.Recipe:
    """The recipe with the paper's options; a mean-pooled base of texts is routed by its mean token."""
    config = json.loads((folder / recipe.base / "config.json").read_text(encoding="utf-8"))
    texts = "vocab_size" in config
    options = {
        "merge": {"rank": "1/T"},
        "router": {
            "first_pass": "fixed", "site": f"M{int(0.8 * config['num_hidden_layers'])}", "threshold": 0.2, "top_k": 3,
            "token": "mean" if texts else "cls",
        },
        "answer": {"score": "logit"},
    }  # fmt: skip
    return mm.Recipe.model_validate(yaml.safe_load(recipe.dump()) | options)


def figures(bundle: Path, given: argparse.Namespace) -> Rung:
    """What a bundle reaches on the suite's rows."""
    result = evaluate(bundle, given.suite, split=given.split, limit=given.limit, oracle=False)
    size = {"times_the_base": round(result.sizes.ratio, 2)} if result.sizes else {}
    return size | {name: round(mean.value, 4) for name, mean in result.means.items()}


if __name__ == "__main__":
    main()
