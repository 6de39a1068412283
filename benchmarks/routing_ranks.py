"""How many singular vectors to route by: `python -m benchmarks.routing_ranks BUNDLE SUITE --shares 0.25 0.5 1 all`.

A share is the part of the space that the subspaces of all tasks may fill together; a third is the default of `router.rank`.
Choose on validation rows. It prints a line of JSON for each share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import massmerge as mm


def measure(bundle: Path, suite: Path, share: float | None, split: str, limit: int) -> dict[str, object]:
    """Accuracy of routing and normalised accuracy at one share; None for all vectors that are kept."""

    def rank(recipe: mm.Recipe, width: int, forms: Sequence[str]) -> int | None:
        return None if share is None else int(width * share / len(forms))

    with patch.object(mm.Recipe, "routing_rank", rank):
        found = mm.evaluate(bundle, suite, split=split, limit=limit, oracle=share is None)
    means = {name: round(100 * mean.value, 2) for name, mean in found.means.items()}
    return {"bundle": bundle.name, "share": "all" if share is None else share, **means}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--shares", nargs="+", default=["0.15", "0.25", "0.35", "0.5", "0.7", "all"])
    parser.add_argument("--split", default="validation")
    parser.add_argument("--limit", type=int, default=60)
    options = parser.parse_args()
    for text in options.shares:
        share = None if text == "all" else float(text)
        print(json.dumps(measure(options.bundle, options.suite, share, options.split, options.limit)), flush=True)


if __name__ == "__main__":
    main()
