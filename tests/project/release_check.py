"""What a release needs beside the tests: `make release-check` builds the packages and runs this on them.

Usage: release_check.py DIST PYTHON, with the folder of the built packages and the interpreter of an empty environment that
the wheel was installed into. Prints a line for each check; exit code 1 if one fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "massmerge"
DEMO = SOURCE / "cli" / "demo" / "data"
# What a wheel may hold: nothing that is compiled, pickled, or of the tests.
KINDS = {".py", ".typed", ".md", ".json", ".yaml", ".txt", ".jsonl", ".safetensors", ".js", ".css", ".html", ".svg", ""}
NEEDED = ("LICENSE", "LICENCES.md", "py.typed", "templates.yaml", "bank.txt", "index.html")
OPEN = """
import sys, massmerge as mm
from massmerge.bundle.manifest import find_damage, read_manifest
from pathlib import Path
for path in map(Path, sys.argv[1:]):
    assert find_damage(path, read_manifest(path)) == [], path
    (mm.StaticModel if path.name == "static" else mm.load)(path)
"""


def version() -> str:
    """The version that the source names."""
    found = re.search(r'^__version__ = "(.+)"$', (SOURCE / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    return found[1]


def changelog_faults(changelog: str, current: str) -> list[str]:
    """What is wrong with a changelog whose newest entry should be of this version."""
    titles = re.findall(r"^## (\S+?),? ", changelog + "\n", re.MULTILINE)
    if not titles or titles[0] != current:
        return [f"the newest entry of CHANGELOG.md is {titles[0] if titles else 'missing'}, the version is {current}"]
    entry = changelog.partition(f"## {current}")[2].partition("\n## ")[0]
    return [] if re.search(r"^- ", entry, re.MULTILINE) else [f"CHANGELOG.md says nothing of {current}"]


def wheel_faults(names: Iterable[str]) -> list[str]:
    """Files that a wheel lacks, or should not have."""
    paths = [PurePosixPath(name) for name in names]
    there = {path.name for path in paths}
    strange = [str(p) for p in paths if p.suffix not in KINDS or p.parts[0] in ("tests", "benchmarks", "examples")]
    return [f"{name} is missing" for name in NEEDED if name not in there] + [f"{name} is in it" for name in strange]


def licence_faults(data: Path = DEMO) -> list[str]:
    """Carried data without a licence: every task's must be named with its licence, and the texts of licences be there."""
    text = (data / "LICENCES.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    named = {name: row[-1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    tasks = {path.name for path in (data / "experts").iterdir()} | {path.stem for path in (data / "rows").iterdir()}
    faults = [f"{task} has no licence in LICENCES.md" for task in sorted(tasks) if not named.get(task)]
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    for task in sorted(tasks & named.keys()):
        covered = "Apache-2.0" in named[task] or "notice below" in named[task]
        if not covered and not any(task in title for title in titles):
            faults.append(f"the text of the licence of {task} ({named[task]}) is missing")
    return faults


def _wheel(dist: Path) -> list[str]:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        return wheel_faults(wheel.namelist())


def _sdist(dist: Path) -> list[str]:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {"/".join(name.split("/")[1:]) for name in archive.getnames()}
    wanted = (
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "CHANGELOG.md",
        "tests/conftest.py",
        "src/massmerge/__init__.py",
    )
    return [f"{name} is missing" for name in wanted if name not in names]


def _names(dist: Path) -> list[str]:
    files = [path.name for path in dist.iterdir()]
    return (
        [] if len(files) == 2 and all(version() in name for name in files) else [f"{files}, the version is {version()}"]
    )


def _run(*command: object) -> list[str]:
    """Run a command in an empty folder, away from the source; what it said if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=900)
    return [] if done.returncode == 0 else [(done.stderr or done.stdout).strip()[-2000:]]


def checks(dist: Path, python: Path) -> dict[str, Callable[[], list[str]]]:
    """Every check by its name; each gives what is wrong."""
    golden = sorted(path.with_suffix("") for path in (ROOT / "tests" / "golden").glob("*/*.json"))
    mass = python.parent / "mass"
    return {
        "one wheel and one sdist of this version": lambda: _names(dist),
        "the changelog has this version": lambda: changelog_faults(
            (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version()
        ),
        "the wheel holds what it should": lambda: _wheel(dist),
        "the sdist is complete": lambda: _sdist(dist),
        "carried data has its licences": licence_faults,
        "the README renders on the package index": lambda: _run(
            sys.executable, "-m", "twine", "check", "--strict", *(path.resolve() for path in dist.iterdir())
        ),
        "mass demo runs from the wheel": lambda: _run(mass, "demo", "--tiny", "-q"),
        f"{len(golden)} stored bundles open": lambda: _run(python, "-c", OPEN, *golden),
    }


def main(dist: Path, python: Path) -> int:
    """Run every check; how many failed."""
    failed = 0
    for name, check in checks(dist, python).items():
        faults = check()
        failed += bool(faults)
        sys.stdout.write(f"{'FAILED' if faults else 'ok':6}  {name}\n" + "".join(f"        {f}\n" for f in faults))
        sys.stdout.flush()
    return failed


if __name__ == "__main__":
    # Not resolved: the interpreter of an environment is a link to the one that it was made with.
    sys.exit(min(main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).absolute()), 1))
