"""Cost of answering at ViT-B/32 size, as ratios to plain forwards of the base: `python benchmarks/answer_cost.py [CASE …]`.

All sides of a ratio run interleaved in one process on the same inputs, and medians are compared. With random weights the
router would send most inputs to a few tasks, so the first pass, the scores and the selection run as they are, and then the
sets that the case asks for are put in the place of the selected ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import AutoModel, CLIPVisionModel

import massmerge as mm
from massmerge.io.placement import DTYPES, Placement
from massmerge.recipe import Unknown
from rebuilding import Rebuilding
from vit_b32 import make_recipe

WHERE = {"device": "cpu", "dtype": "float32"}
"""Where all sides run; `main` puts the options here."""
PAPER = {"first_pass": "fixed", "site": "M9", "token": "cls"}
HALF = {"site": [f"M{block}" for block in range(6)]}


def bundle(tasks: int, rank: str | None = None, **router: str | float | list[str]) -> Path:
    """A bundle of that many tasks, by the byte budget or of some rank, merged once and kept."""
    sections = {"merge": {"rank": rank} if rank else {}, "router": router}
    recipe = make_recipe(tasks, **{name: given for name, given in sections.items() if given})
    out = recipe.with_name(recipe.stem.replace("recipe", "bundle"))
    mm.merge(recipe, out, overwrite=True)
    return out


def answer(model: mm.Model, batch: dict[str, Tensor], sets: list[list[str]]) -> tuple[float, float]:
    """Both passes and the heads for a batch whose selected sets are given; seconds of first pass and of routing."""
    batch = model.core.placement.batch(batch)
    routings, timings = model.stages.look(batch, model.stages.choice(unknown=Unknown()))
    routings = [replace(r, selected=s) for r, s in zip(routings, sets, strict=True)]
    model._heads(model.sets.forward(batch, routings, for_heads=True), routings, 3)
    return timings["first pass"] / 1000, timings["routing"] / 1000


def interleaved(
    sides: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each side, taken in turns; `time.process_time` counts what all cores worked."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, run in sides.items():
            began = clock()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(clock() - began)
    return {name: statistics.median(found[1:]) for name, found in times.items()}  # the first round warms up


def images(count: int) -> dict[str, Tensor]:
    """Random images of the right size."""
    return {"pixel_values": torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(5))}


def load(path: Path) -> mm.Model:
    """A bundle where the options say."""
    return mm.load(path, check=False, **WHERE)


def plain_base(path: Path, kind: Any = CLIPVisionModel) -> Any:
    """The base as transformers alone runs it, there too."""
    place = Placement.choose(**WHERE)
    return kind.from_pretrained(path / "base", dtype=place.storage).eval().to(place.device)


def mixed(path: Path, sets: Callable[[mm.Model, int], list[list[str]]], repeats: int) -> dict[str, float]:
    """A batch of 64 of mixed tasks, against one plain forward."""
    model, base = load(path), plain_base(path)
    batch = model.core.placement.batch(images(64))
    chosen = sets(model, 64)
    parts: list[tuple[float, float]] = []

    @torch.inference_mode()
    def plain() -> None:
        base(**batch)

    found = interleaved({"plain": plain, "mass": lambda: parts.append(answer(model, batch, chosen))}, repeats)
    first, routing = (statistics.median(p[i] for p in parts[1:]) for i in (0, 1))
    plain_s = found["plain"]
    return {
        "ratio": found["mass"] / plain_s,
        "first pass": first / plain_s,
        "routing share": routing / first,
        "plain s": plain_s,
    }


def evenly(model: mm.Model, count: int) -> list[list[str]]:
    """One task each, all tasks equally often."""
    return [[model.tasks[i % len(model.tasks)]] for i in range(count)]


def pairs(model: mm.Model, count: int) -> list[list[str]]:
    """Two tasks each, in as many different pairs as there are tasks."""
    names = model.tasks
    return [[names[i % len(names)], names[(i + 1) % len(names)]] for i in range(count)]


def one_decision(repeats: int) -> dict[str, float]:
    """`route="batch"` on 32 inputs of one task, against one plain forward of them."""
    path = bundle(8, **HALF)
    model, base = load(path), plain_base(path)
    rows = list(images(32)["pixel_values"])
    batch = model.core.placement.batch(images(32))

    @torch.inference_mode()
    def plain() -> None:
        base(**batch)

    found = interleaved({"plain": plain, "mass": lambda: model.predict(rows, route="batch", batch_size=32)}, repeats)
    return {"ratio": found["mass"] / found["plain"], "plain s": found["plain"]}


def draw(batches: int, names: list[str]) -> list[list[list[str]]]:
    """Sets for batches of 16, as the paper's threshold and K select them for the eight image tasks (`stream_sets.py`)."""
    measured = json.loads(Path(__file__).with_name("stream_sets.json").read_text())
    sets = [[names[task] for task in one["tasks"]] for one in measured]
    chance = random.Random(3)
    return [chance.choices(sets, [one["inputs"] for one in measured], k=16) for _ in range(batches)]


def stream(batches: int, every: int, own: str | None = None, others: str | None = None) -> dict[str, float]:
    """Batches of 16 from a mixed stream, cold start; rebuilding is timed on every so many-th, time a batch is compared.

    Rebuilding runs as the authors' code does, and once more spared of the SVDs that sets of one task do not need. Ranks are
    those of the byte budget, or `own` for our side and `others` for the rebuilding; the authors' code keeps 1/T. What either
    side needs before the first batch is spread over all batches.
    """
    path, dense = bundle(8, own, **HALF), bundle(8, others, **HALF)
    plan = draw(batches, [t.name for t in mm.Bundle(path, check=False).tasks])
    batch = images(16)
    began = time.perf_counter()
    model = load(path)
    ours = time.perf_counter() - began
    began = time.perf_counter()
    rebuilding = [Rebuilding(dense, plain_base(dense), spared=spared) for spared in (False, True)]
    start = (time.perf_counter() - began) / len(rebuilding)
    theirs = [0.0, 0.0]
    for i, sets in enumerate(plan):
        began = time.perf_counter()
        answer(model, batch, sets)
        ours += time.perf_counter() - began
        for side, other in enumerate(rebuilding if i % every == 0 else []):
            began = time.perf_counter()
            other.run(batch["pixel_values"], sets)
            theirs[side] += time.perf_counter() - began
    ours, rebuilt = ours / batches, len(range(0, batches, every))
    full, spared = (
        start / batches + other.seconds_a_batch(taken, plan, every)
        for other, taken in zip(rebuilding, theirs, strict=True)
    )
    return {
        "ratio": full / ours, "ratio spared": spared / ours, "ours s/batch": ours, "rebuilding s/batch": full,
        "start of rebuilding s": start, "rebuilt batches": rebuilt,
    }  # fmt: skip


_LOAD = """
import sys, time, resource, os, torch, transformers, massmerge as mm
from transformers import CLIPVisionModel
import psutil
torch.manual_seed(0)
mm.load, CLIPVisionModel  # both sides have imported what they need: massmerge does so when a name is first asked for
x = torch.randn(1, 3, 224, 224)
before = psutil.Process().memory_info().rss
began = time.perf_counter()
if sys.argv[1] == "base":
    model = CLIPVisionModel.from_pretrained(sys.argv[2] + "/base").eval()
    with torch.inference_mode():
        model(pixel_values=x)
else:
    model = mm.load(sys.argv[2], check={"": False, "check": True, "background": "background"}[sys.argv[3]])
    model.predict([x[0]])
print(time.perf_counter() - began, psutil.Process().memory_info().rss - before, psutil.Process().memory_info().rss)
"""


def loading(path: Path, repeats: int) -> dict[str, float]:
    """Time to the first answer and resident memory after it, each in a process of its own, in turns."""
    found: dict[str, list[list[float]]] = {"base": [], "bundle": [], "unchecked": [], "checked": []}
    for _ in range(repeats):
        for side, check in (("base", ""), ("bundle", "background"), ("unchecked", ""), ("checked", "check")):
            arguments = ["base" if side == "base" else "bundle", str(path), check]
            child = subprocess.run(
                [sys.executable, "-c", _LOAD, *arguments], check=True, capture_output=True, text=True
            )
            found[side].append([float(x) for x in child.stdout.split()])
    base, ours, unchecked, checked = ([statistics.median(c) for c in zip(*found[s], strict=True)] for s in found)
    return {
        "time ratio": ours[0] / base[0], "unchecked": unchecked[0] / base[0], "checked first": checked[0] / base[0],
        "memory ratio": ours[1] / base[1], "memory ratio of processes": ours[2] / base[2],
        "base s": base[0], "base MB": base[1] / 1e6,
    }  # fmt: skip


def text(repeats: int, suite: str = "text") -> dict[str, float]:
    """64 test rows of eight text tasks in one batch, routed as they are, against plain forwards of the suite's base.

    `ratio` is against the rows sorted by length in two halves, `padded` against all of them padded to the longest.
    """
    home = Path(os.environ.get("MASS_CACHE", Path.home() / ".cache" / "massmerge")) / "suites" / suite
    model = load(home / "bundles" / "core")
    base = plain_base(home / "bundles" / "core", AutoModel)
    found = [
        row
        for task in model.tasks
        for row in pq.read_table(home / "data" / task / "test.parquet").column("text").to_pylist()[:8]
    ]
    random.Random(0).shuffle(found)
    rows = [model.read(row) for row in found]
    by_length = sorted(rows, key=lambda row: -len(row["input_ids"]))

    @torch.inference_mode()
    def plain(*parts: list[dict[str, Tensor]]) -> None:
        for part in parts:
            base(**model.core.batch(part))

    sides = {
        "padded": lambda: plain(rows),
        "sorted": lambda: plain(by_length[:32], by_length[32:]),
        "routing": lambda: model.route(rows, batch_size=64),
        "mass": lambda: model.predict(rows, batch_size=64),
    }
    wall, work = interleaved(sides, repeats), interleaved(sides, repeats, time.process_time)
    return {
        "ratio": wall["mass"] / wall["sorted"], "ratio by work": work["mass"] / work["sorted"],
        "padded": wall["mass"] / wall["padded"], "routing": wall["routing"] / wall["sorted"], "sorted s": wall["sorted"],
    }  # fmt: skip


def cases(repeats: int) -> dict[str, tuple[Callable[[], dict[str, float]], dict[str, float]]]:
    """Each case with the bounds that it must keep; a bound on the rebuilding is a least, all others are a most."""
    return {
        "mixed": (lambda: mixed(bundle(8, **HALF), evenly, repeats), {"ratio": 1.65, "routing share": 0.01}),
        "paper": (lambda: mixed(bundle(8, **PAPER), evenly, repeats), {"ratio": 1.95}),
        "twenty": (lambda: mixed(bundle(20, **HALF), evenly, repeats), {"ratio": 1.60}),
        "pairs": (lambda: mixed(bundle(8, **HALF), pairs, repeats), {"ratio": 1.85}),
        "unsure": (lambda: mixed(bundle(8, unsure=1e9), evenly, repeats), {}),  # the worst case: a closer look at all
        "text": (lambda: text(repeats), {"ratio": 1.6}),
        "text_mpnet": (lambda: text(repeats, "mpnet"), {"ratio": 1.6}),
        "batch": (lambda: one_decision(repeats), {"ratio": 1.35}),
        # Both sides as they come: our byte budget, the authors' rank. Then one rank for both, the budget's and the paper's.
        "stream": (lambda: stream(100, 10, None, "1/T"), {"at least": 10.0}),
        "stream_budget": (lambda: stream(40, 10), {}),
        "stream_rank": (lambda: stream(40, 10, "1/T", "1/T"), {}),
        "load": (lambda: loading(bundle(8, **HALF), repeats), {"time ratio": 2.0, "memory ratio": 2.2}),
        # The worst case: noise is unclear to random experts, so it is looked at again and answered by every candidate.
        "load_unsure": (lambda: loading(bundle(8), repeats), {"memory ratio": 2.2}),
        "load_paper": (lambda: loading(bundle(8, **PAPER), repeats), {"memory ratio": 3.0}),
    }


ON_THE_CPU = {"stream", "stream_budget", "stream_rank", "load", "load_unsure", "load_paper"}
"""Cases whose other side is dense models on the CPU, or the memory of a process."""


def main() -> None:
    """Run the cases, print, and fail where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CASE", help=", ".join(cases(1)))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cpu", help="such as cuda; bounds are those of the CPU")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    options = parser.parse_args()
    WHERE.update(device=options.device, dtype=options.dtype)
    if options.device != "cpu" and {*(options.names or cases(1))} & ON_THE_CPU:
        parser.error(f"{', '.join(sorted(ON_THE_CPU))} are measured on the CPU: name other cases.")
    results, faults = {}, []
    for name, (run, bounds) in cases(options.repeats).items():
        if options.names and name not in options.names:
            continue
        results[name] = found = run()
        for key, bound in bounds.items():
            missed = found["ratio"] < bound if key == "at least" else found[key] > bound
            if missed:
                faults.append(f"{name}: {found['ratio' if key == 'at least' else key]:.3f} misses {key} {bound}")
        if not options.json:
            print(f"{name:<11}" + "  ".join(f"{k} {v:.3f}" for k, v in found.items()), flush=True)
    if options.json:
        print(json.dumps({"results": results, "faults": faults}, indent=2))
    else:
        print("\n".join(faults) or "all bounds hold")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
