"""The studies of a suite as one page: `python -m benchmarks.suites.studies text --publish docs/results`.

Runs nothing: it takes what `mass study … --out study` has written in the suite's folder, one study or all, and copies the
pictures beside the page. Of a study that was run into several folders the last one named counts. A line or more between
`<!-- note -->` and `<!-- end -->` of a page that is there stays.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suites.fetch import cache_root
from massmerge.evaluation.report import as_markdown
from massmerge.research.studies import STUDIES
from massmerge.research.studies.overview import verdict_parts
from massmerge.research.studies.study import Verdict


def write_page(folders: Sequence[Path], suite: str, target: Path) -> Path:
    """Write `studies-SUITE.md`: who won, then each study, and the names of those that are missing.

    Args:
        folders: where studies have been written, a folder each.
        suite: the suite's name.
        target: where the page goes.
    """
    path, prefix = target / f"studies-{suite}.md", f"studies-{suite}"
    reports = {
        name: folder / name for name in STUDIES for folder in folders if (folder / name / "result.json").is_file()
    }
    results = {
        name: json.loads((report / "result.json").read_text(encoding="utf-8")) for name, report in reports.items()
    }
    verdicts = {name: Verdict(**result["verdict"]) for name, result in results.items()}
    first = next(iter(results.values()))
    title, _, overview = as_markdown(
        f"Studies of MASS on {first['suite']}", verdict_parts(verdicts, first["data"])
    ).partition("\n")
    begin = f"What `mass study` found, with command, date and rows. See [study](../study.md), [the suite]({suite}.md)."
    missing = [name for name in STUDIES if name not in reports]
    parts = [title, begin, *_kept_note(path), overview.strip()]
    parts += [f"Not run on this suite yet: {', '.join(missing)}."] if missing else []
    parts += [_section(name, results[name]["title"], report, prefix, target) for name, report in reports.items()]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _kept_note(path: Path) -> list[str]:
    """What somebody wrote into the page that is there."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return re.findall(r"<!-- note -->.*?<!-- end -->", text, flags=re.DOTALL)


def _section(name: str, title: str, report: Path, prefix: str, target: Path) -> str:
    """The text of a report a level deeper, with pictures that lie beside the page."""
    _, _, text = (report / "report.md").read_text(encoding="utf-8").partition("\n")
    for picture in re.findall(r"\]\(([\w.-]+\.png)\)", text):
        shutil.copyfile(report / picture, target / f"{prefix}-{picture}")
        text = text.replace(f"]({picture})", f"]({prefix}-{picture})")
    text = text.replace("## How it was measured", "**How it was measured**").replace(str(Path.home()), "~")
    text = re.sub(r" --out [^\s`]+", " --out study", text)  # where it ran says nothing
    return f"## {name}: {title}\n\n{text.strip()}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suites.studies", description=__doc__)
    parser.add_argument("suite", choices=("vision", "text"))
    parser.add_argument("--publish", type=Path, required=True, help="a folder for the page and its pictures")
    parser.add_argument(
        "--study", default="study", help="folders in that of the suite which studies were written to, with commas"
    )
    options = parser.parse_args(arguments)
    place = cache_root() / options.suite
    folders = [place / name for name in options.study.split(",")]
    for folder in folders:
        if not any(folder.glob("*/result.json")):
            print(
                f"error: {folder}: no studies there. Run `mass study NAME … --out {folder.name}` in {place}.",
                file=sys.stderr,
            )
            return 2
    print(write_page(folders, options.suite, options.publish))
    return 0


if __name__ == "__main__":
    sys.exit(main())
