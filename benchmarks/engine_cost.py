"""What an engine costs beside the work: `python benchmarks/engine_cost.py [--units 400] [--rows 20000]`.

Units that do next to nothing give the cost per unit, answers of a bundle the cost per row, against the same rows in one
process. Processor time of this process and of Ray's counts: it does not depend on what else runs. A Ray of two cores is
started on this machine, or the one at `--address` is used.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from massmerge.bundle.checksum_job import Checksums
from massmerge.cli.demo.example import make_example
from massmerge.engines.job import Engine
from massmerge.engines.local import LocalEngine
from massmerge.engines.unit import Unit
from massmerge.merging.run import merge
from massmerge.model.load import load
from massmerge.model.row_job import EngineModel


def processor_seconds() -> float:
    """What this process, its children and every process of Ray on this machine have taken."""
    total = 0.0
    for process in psutil.process_iter(["pid", "cmdline", "cpu_times"]):
        line = " ".join(process.info["cmdline"] or ())
        if process.info["pid"] == os.getpid() or "ray" in line.split("/")[-1] or "raylet" in line or "ray::" in line:
            times = process.info["cpu_times"]
            total += times.user + times.system
    return total


def cost(action: Callable[[], object]) -> dict[str, float]:
    """Seconds of processor and clock that an action takes, the second time."""
    action()
    before, began = processor_seconds(), time.perf_counter()
    action()
    return {"processor": processor_seconds() - before, "clock": time.perf_counter() - began}


def per_unit(engine: Engine, count: int) -> dict[str, float]:
    """Milliseconds per unit that is the checksum of an empty file."""
    units = [Unit(f"u{i}", data=Path(os.devnull)) for i in range(count)]
    found = cost(lambda: engine.run(Checksums(), units, lambda unit, result: None))
    return {name: 1000 * value / count for name, value in found.items()}


def per_row(engine: Engine | None, bundle: Path, rows: list[str], folder: Path) -> dict[str, float]:
    """Milliseconds per row."""
    model = load(bundle) if engine is None else None

    def answer() -> None:
        if model is not None:
            assert sum(1 for _ in model.stream(rows)) == len(rows)
            return
        assert engine is not None
        with EngineModel.opened(bundle, engine, folder / "parts") as answering:
            assert sum(1 for _ in answering.stream(rows, batch_size=32)) == len(rows)

    return {name: 1000 * value / len(rows) for name, value in cost(answer).items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=400)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--address")
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    from massmerge.engines.ray import RayEngine

    more = {} if options.address else {"num_cpus": 2, "include_dashboard": False}
    ray.init(options.address, log_to_driver=False, **more)
    with tempfile.TemporaryDirectory(prefix="mass-engines-") as name:
        folder = Path(name)
        bundle = merge(make_example(folder / "example"), folder / "bundle")
        rows = [f"a moving, quiet film about row {i} of a long table" for i in range(options.rows)]
        engines: dict[str, Engine | None] = {"one process": None, "local": LocalEngine(2), "ray": RayEngine()}
        units = {name: per_unit(engine, options.units) for name, engine in engines.items() if engine is not None}
        found = {"ms per unit": units}
        found["ms per row"] = {name: per_row(engine, bundle, rows, folder) for name, engine in engines.items()}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
