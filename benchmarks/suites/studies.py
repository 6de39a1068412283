"""The studies of a suite as one page: `python -m benchmarks.suites.studies text --publish docs/results`.

Runs nothing: it takes the reports that `mass study NAME … --out study` has written in the suite's folder, in the order of
`mass study --list`, and copies their pictures beside the page.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suites.fetch import cache_root
from massmerge.evaluation.studies import STUDIES


def write_page(folder: Path, suite: str, target: Path) -> Path:
    """Write `studies-SUITE.md` with the reports that there are, and say which studies are missing.

    Args:
        folder: where studies have been written, a folder each.
        suite: the suite's name.
        target: where the page goes.
    """
    found = [name for name in STUDIES if (folder / name / "report.md").is_file()]
    missing = [name for name in STUDIES if name not in found]
    lines = [f"# Studies on the {suite} suite", ""]
    lines += [
        f"What `mass study` found, with command, date and rows. See [study](../study.md), [the suite]({suite}.md).",
        "",
    ]
    if missing:
        lines += [f"Not run on this suite yet: {', '.join(missing)}.", ""]
    for name in found:
        lines.append(_section(folder / name, f"studies-{suite}", target))
    path = target / f"studies-{suite}.md"
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def _section(report: Path, prefix: str, target: Path) -> str:
    """One report a level deeper, with pictures that lie beside the page; captions stand in the pictures' own text."""
    text = (report / "report.md").read_text(encoding="utf-8")
    for picture in re.findall(r"\]\(([\w.-]+\.png)\)", text):
        shutil.copyfile(report / picture, target / f"{prefix}-{picture}")
        text = text.replace(f"]({picture})", f"]({prefix}-{picture})")
    text = text.replace("## How it was measured", "**How it was measured**")
    text = re.sub(r" --out /\S+", " --out study", text.replace(str(Path.home()), "~"))  # where it ran says nothing
    return re.sub(r"^(#+) ", r"#\1 ", text, flags=re.MULTILINE).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites.studies", description=__doc__)
    parser.add_argument("suite", choices=("vision", "text"))
    parser.add_argument("--publish", type=Path, required=True, help="a folder for the page and its pictures")
    options = parser.parse_args(arguments)
    folder = cache_root() / options.suite / "study"
    if not folder.is_dir():
        print(
            f"error: {folder}: no studies there. Run `mass study NAME … --out study` in {folder.parent}.",
            file=sys.stderr,
        )
        return 2
    print(write_page(folder, options.suite, options.publish))
    return 0


if __name__ == "__main__":
    sys.exit(main())
