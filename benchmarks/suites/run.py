"""A suite from nothing to its report: fetch, finetune, merge, evaluate, compare, rungs, report.

Each step skips what is there already, so a run that was stopped goes on where it was. What is merged and evaluated is run by
the `mass` command, as a user would; the commands are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.suites.fetch import cache_root
from benchmarks.suites.summary import SEEDS, rung_rows, write_summary
from massmerge import __version__
from massmerge.errors import InputError, MassError

STEPS = ("fetch", "finetune", "merge", "evaluate", "compare", "rungs", "report")
DEFAULT_SETS = {
    "vision": ("core", "wide", "wide20", "alike", "scripts"),
    "text": ("core", "wide", "alike", "lora", "lora_same_start", "mixed", "seed1", "seed2"),
    "mpnet": ("core",),
    "llm": ("chat", "bare"),
}
PACKAGES = {"mpnet": "text"}
"""Suites of another base, with the tasks of one that has a package of its own."""
QUICK_ROWS = 40
EVALUATED_ROWS = {"mpnet": 200}  # of each task, for a row of a larger base takes longer; all rows if not said
COMPARED_ROWS = 60  # of each task, for the methods that a sceptic asks for
EVERY_ROWS = 25  # where all two dozen methods answer, some of them after training
EVERY_METHOD = ("text", "core")
INPUTS_PER_TASK = ("0", "16", "64", "400")
FEW_INPUTS = {"mpnet": 2}  # of these, where a row takes long
OWN_TABLES = ("llm",)  # suites whose tables come from scripts of their own


@dataclass(frozen=True)
class Suite:
    """The parts of one suite, found by their names in its package."""

    name: str
    backbone: Any
    tasks: Any
    experts: Any
    recipe: Any

    @property
    def folder(self) -> Path:
        """Where base, data, experts, bundles and reports lie."""
        return cache_root() / self.name

    @property
    def base(self) -> tuple[str, ...]:
        """Which of the package's bases, if not its first."""
        return (self.name,) if self.name in PACKAGES else ()

    def write_files(self, batch: Batch) -> tuple[Path, Path]:
        """Recipe and suite file of some tasks."""
        found: tuple[Path, Path] = self.recipe.write_files(
            batch.name, batch.tasks, *([self.folder] if self.base else [])
        )
        return found


@dataclass(frozen=True)
class Batch:
    """Some tasks that are merged into one bundle and evaluated together."""

    name: str
    tasks: tuple[str, ...]


def open_suite(name: str) -> Suite:
    """The suite's modules; imported when needed, because each brings its own model class."""
    package = PACKAGES.get(name, name)
    parts = {part: importlib.import_module(f"benchmarks.suites.{package}.{part}") for part in _PARTS}
    return Suite(name, **parts)


_PARTS = ("backbone", "tasks", "experts", "recipe")


def choose_batches(suite: Suite, sets: str | None, tasks: str | None) -> list[Batch]:
    """The sets that were asked for, cut to the tasks that were asked for.

    Raises:
        InputError: there is no such set or task; those that there are are listed.
    """
    names = _listed(sets) or DEFAULT_SETS[suite.name]
    known = suite.recipe.SETS
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"no such set: {', '.join(unknown)}. The {suite.name} suite has {', '.join(known)}.")
    wanted = _listed(tasks)
    if unknown := [task for task in wanted if task not in suite.tasks.TASKS]:
        raise InputError(
            f"no such task: {', '.join(unknown)}. The {suite.name} suite has {', '.join(suite.tasks.TASKS)}."
        )
    if not wanted:
        return [Batch(name, tuple(known[name])) for name in names]
    # Other names, so that the files of the whole sets stay.
    batches = [Batch(f"{name}-part", tuple(task for task in known[name] if task in wanted)) for name in names]
    return [batch for batch in batches if batch.tasks]


def fetch(suite: Suite, batch: Batch, options: argparse.Namespace) -> None:
    """The base and the data."""
    suite.backbone.make_base(*suite.base)
    for task in batch.tasks:
        suite.tasks.make_data(task)


def finetune(suite: Suite, batch: Batch, options: argparse.Namespace) -> None:
    """An expert for each task."""
    common = [*(["--quick"] if options.quick else []), *(["--suite", *suite.base] if suite.base else [])]
    kinds: dict[str, list[str]] = {}
    for task in batch.tasks:
        kinds.setdefault(suite.recipe.kind_of(batch.name, task), []).append(task)
    for kind, tasks in kinds.items():
        suite.experts.main(["--tasks", ",".join(tasks), *(["--kind", kind] if kind != "full" else []), *common])


def merge(suite: Suite, batch: Batch, options: argparse.Namespace) -> None:
    """The bundle, unless one of the same recipe and experts is there."""
    recipe, _ = suite.write_files(batch)
    experts = [suite.folder / task["expert"] for task in yaml.safe_load(recipe.read_text(encoding="utf-8"))["tasks"]]
    metrics = [expert / "metrics.json" for expert in experts]
    bundle = _bundle(suite, batch)
    bundle.parent.mkdir(exist_ok=True)
    _once(bundle.with_suffix(".key"), bundle, [recipe, *metrics], options.again, lambda: _mass(
        "merge", recipe, bundle, "--overwrite"
    ))  # fmt: skip


def evaluate(suite: Suite, batch: Batch, options: argparse.Namespace) -> None:
    """The figures on the test split, with a report folder for each bundle."""
    _, suite_file = suite.write_files(batch)
    bundle, report = _bundle(suite, batch), suite.folder / "report" / batch.name
    if not (bundle / "mass.json").is_file():
        raise InputError(f"{bundle}: no bundle there. Run the merge step first.")
    report.parent.mkdir(exist_ok=True)
    rows = QUICK_ROWS if options.quick else EVALUATED_ROWS.get(suite.name)
    limit = ["--limit", str(rows)] if rows else []
    _once(report.with_suffix(".key"), report, [suite_file, bundle / "mass.json"], options.again, lambda: _mass(
        "eval", bundle, suite_file, "--report", report, *limit
    ))  # fmt: skip


def compare(suite: Suite, batch: Batch, options: argparse.Namespace) -> None:
    """The table of every method on some of the test rows."""
    if suite.name in OWN_TABLES or batch.name in SEEDS:
        return
    recipe, suite_file = suite.write_files(batch)
    out, bundle = suite.folder / "compare" / batch.name, _bundle(suite, batch)
    out.mkdir(parents=True, exist_ok=True)
    every = (suite.name, batch.name) == EVERY_METHOD and not options.quick
    rows = QUICK_ROWS if options.quick else EVERY_ROWS if every else COMPARED_ROWS
    extent = ["--limit", str(rows), *([] if every else ["--quick"])]
    _once(out / "key", out / "methods", [suite_file, bundle / "mass.json"], options.again, lambda: _mass(
        "study", "methods", suite_file, "--bundle", bundle, "--recipe", recipe, "--out", out, "-q", *extent
    ))  # fmt: skip


def rungs(suite: Suite, batch: Batch, options: argparse.Namespace) -> None:
    """What routing reaches with no inputs, with some of each task, and in the paper's setting."""
    if suite.name in OWN_TABLES or batch.name in SEEDS:
        return
    recipe, suite_file = suite.write_files(batch)
    out, bundle = suite.folder / "compare" / f"{batch.name}-rungs.json", _bundle(suite, batch)
    out.parent.mkdir(exist_ok=True)
    rows = str(QUICK_ROWS if options.quick else rung_rows(suite.name))
    counts = INPUTS_PER_TASK[: FEW_INPUTS.get(suite.name)]
    _once(out.with_suffix(".key"), out, [suite_file, bundle / "mass.json"], options.again, lambda: _python(
        "benchmarks.ladder", bundle, suite_file, suite.folder / "data", "--recipe", recipe, "--out", out,
        "--limit", rows, "--count", *counts,
    ))  # fmt: skip


def report(suite: Suite, batch: Batch, options: argparse.Namespace) -> None:
    """One page about experts and bundles of the suite."""
    print(f"  {write_summary(suite.folder, suite.name, options.publish)}", flush=True)


_RUN: dict[str, Callable[[Suite, Batch, argparse.Namespace], None]] = {
    "fetch": fetch, "finetune": finetune, "merge": merge, "evaluate": evaluate, "compare": compare,
    "rungs": rungs, "report": report,
}  # fmt: skip


def run(suite: Suite, batches: Sequence[Batch], steps: Sequence[str], options: argparse.Namespace) -> None:
    """All steps of each set, set after set: the first bundle is evaluated before the next experts are trained."""
    for batch in batches:
        for step in steps:
            print(f"\n{suite.name} · {batch.name} ({len(batch.tasks)} tasks) · {step}", flush=True)
            began = time.perf_counter()
            _RUN[step](suite, batch, options)
            print(f"  {step} done in {time.perf_counter() - began:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites", description=__doc__)
    parser.add_argument("suite", choices=tuple(DEFAULT_SETS))
    parser.add_argument(
        "--sets",
        help="comma-separated: core, wide, alike, all; for vision also wide20 and scripts (letters of five scripts drawn by "
        "the same code: a stress test like alike); for text lora, lora_same_start, mixed, seed1, seed2; for llm chat, bare, "
        "qv, seed",
    )
    parser.add_argument("--tasks", help="comma-separated; of the sets, only these tasks")
    parser.add_argument("--steps", help=f"comma-separated, of {', '.join(STEPS)}; all if not given")
    parser.add_argument("--quick", action="store_true", help="few rows and steps, in a cache of its own: does it run?")
    parser.add_argument("--again", action="store_true", help="merge and evaluate even if nothing has changed")
    parser.add_argument(
        "--publish", type=Path, help="a folder for the report's page and pictures, instead of the cache"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        _use_quick_cache()
    try:
        steps = _listed(options.steps) or STEPS
        if unknown := [step for step in steps if step not in STEPS]:
            raise InputError(f"no such step: {', '.join(unknown)}. The steps are {', '.join(STEPS)}.")
        suite = open_suite(options.suite)
        run(suite, choose_batches(suite, options.sets, options.tasks), [s for s in STEPS if s in steps], options)
    except MassError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def _use_quick_cache() -> None:
    """A cache below the real one, which shares its downloads: experts of a quick run must not be taken for real ones."""
    downloads = cache_root() / "downloads"
    downloads.mkdir(exist_ok=True)
    os.environ["MASS_CACHE"] = str(cache_root().parent / "quick")
    link = cache_root() / "downloads"
    if not link.exists():
        link.symlink_to(downloads, target_is_directory=True)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _bundle(suite: Suite, batch: Batch) -> Path:
    return suite.folder / "bundles" / batch.name


def _once(stamp: Path, made: Path, inputs: Sequence[Path], again: bool, make: Callable[[], None]) -> None:
    """Make something unless it was made from inputs of the same content by the same version."""
    digest = hashlib.sha256(__version__.encode())
    for path in inputs:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    key = digest.hexdigest()
    if not again and made.exists() and stamp.is_file() and stamp.read_text(encoding="utf-8") == key:
        print(f"  {made}: up to date", flush=True)
        return
    make()
    stamp.write_text(key, encoding="utf-8")


def _mass(*arguments: str | Path) -> None:
    """Run the `mass` command that belongs to this Python."""
    _run_shown(f"mass {arguments[0]}", arguments, "-c", "from massmerge.cli.main import main; main()", *arguments)


def _python(module: str, *arguments: str | Path) -> None:
    """Run a script of the benchmarks in a process of its own."""
    _run_shown(f"python -m {module}", (module, *arguments), "-m", module, *arguments)


def _run_shown(what: str, shown: Sequence[str | Path], *arguments: str | Path) -> None:
    print(f"  $ {what} {' '.join(map(str, shown[1:]))}", flush=True)
    code = subprocess.run([sys.executable, *map(str, arguments)], check=False).returncode
    if code:
        raise MassError(f"`{what}` ended with exit code {code}; its message is above.")
