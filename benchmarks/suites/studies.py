"""The studies of a suite as one page: `python -m benchmarks.suites.studies text --publish docs/results`.

Runs nothing: it takes the report that `mass study all … --out study` has written in the suite's folder, or else those of
single studies in the order of `mass study --list`, and copies their pictures beside the page.
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
    """Write `studies-SUITE.md`: the report of all studies, or those that there are with the names of the missing ones.

    Args:
        folder: where studies have been written, a folder each.
        suite: the suite's name.
        target: where the page goes.
    """
    begin = (
        f"What `mass study` found, with command, date and rows. See [study](../study.md), [the suite]({suite}.md).\n"
    )
    prefix = f"studies-{suite}"
    if (folder / "report.md").is_file():
        title, _, rest = _copied(folder, prefix, target).partition("\n")
        text = f"{title}\n\n{begin}{rest}"
    else:
        found = [name for name in STUDIES if (folder / name / "report.md").is_file()]
        missing = [name for name in STUDIES if name not in found]
        lines = [f"# Studies on the {suite} suite\n", begin]
        if missing:
            lines.append(f"Not run on this suite yet: {', '.join(missing)}.\n")
        text = "\n".join([*lines, *(_section(folder / name, prefix, target) for name in found)])
    path = target / f"{prefix}.md"
    path.write_text(text.rstrip() + "\n", encoding="utf-8")
    return path


def _copied(report: Path, prefix: str, target: Path) -> str:
    """The text of a report, with pictures that lie beside the page."""
    text = (report / "report.md").read_text(encoding="utf-8")
    for picture in re.findall(r"\]\(([\w.-]+\.png)\)", text):
        shutil.copyfile(report / picture, target / f"{prefix}-{picture}")
        text = text.replace(f"]({picture})", f"]({prefix}-{picture})")
    return re.sub(r" --out /\S+", " --out study", text.replace(str(Path.home()), "~"))  # where it ran says nothing


def _section(report: Path, prefix: str, target: Path) -> str:
    """One report a level deeper."""
    text = _copied(report, prefix, target).replace("## How it was measured", "**How it was measured**")
    return re.sub(r"^(#+) ", r"#\1 ", text, flags=re.MULTILINE).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites.studies", description=__doc__)
    parser.add_argument("suite", choices=("vision", "text"))
    parser.add_argument("--publish", type=Path, required=True, help="a folder for the page and its pictures")
    parser.add_argument(
        "--study", default="study", help="the folder in that of the suite which studies were written to"
    )
    options = parser.parse_args(arguments)
    folder = cache_root() / options.suite / options.study
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
