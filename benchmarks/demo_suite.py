"""A suite of the demo's five experts with all rows of the text suite's data, and the experts' accuracy for reference.

    mass demo --folder DEMO
    python -m benchmarks.suites text --sets core --steps fetch
    python -m benchmarks.demo_suite DEMO

Writes DEMO/suite-full.yaml. The demo has the experts of the text suite, cut to rank 16: they measure routing where nothing
has been trained.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

from benchmarks.suites.fetch import cache_root


def main() -> None:
    """Write the suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path)
    folder = parser.parse_args().demo
    suite = yaml.safe_load((folder / "suite.yaml").read_text(encoding="utf-8"))
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    for name, task in suite["tasks"].items():
        task["data"] = str(cache_root() / "text" / "data" / name / "{split}.parquet")
        task["reference"] = {split: about["tasks"][name][split]["expert"] for split in ("validation", "test")}
    path = folder / "suite-full.yaml"
    path.write_text(yaml.safe_dump(suite, sort_keys=False), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
