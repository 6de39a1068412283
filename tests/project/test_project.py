"""The project's own files agree with each other: workflow, Makefile, version, citation."""

import itertools
import re
import tomllib
from pathlib import Path

import yaml

import massmerge

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def makefile_targets() -> set[str]:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    return {name for line in lines if (found := re.match(r"([\w -]+):(?!=)", line)) for name in found[1].split()}


def commands(job: dict) -> list[str]:
    """The commands of a workflow's job, for every cell of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    found = []
    for values in itertools.product(*matrix.values()):
        for step in job["steps"]:
            if "run" in step:
                text = step["run"]
                for name, value in zip(matrix, values, strict=True):
                    text = text.replace("${{ matrix." + name + " }}", value)
                found.append(text)
    return found


def test_every_command_of_the_workflows_is_a_target_of_the_makefile():
    targets = makefile_targets()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        for command in (command for job in jobs.values() for command in commands(job)):
            words = [word for word in command.split() if "=" not in word]
            assert words[0] == "make" and {*words[1:]} <= targets, command


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/massmerge/__init__.py"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(massmerge.__version__)}\b", changelog, re.MULTILINE)


def test_links_of_the_readme_are_absolute_on_the_package_index():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    links = re.findall(r"\]\((.+?)\)", text)
    assert len(links) > 20 and all(link.startswith(("https://", "#")) for link in links)


def test_the_lowest_versions_are_those_that_are_tested():
    """`make test-lowest` installs the floor of every library that we ask for by name."""
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [
        *PROJECT["project"]["dependencies"],
        *(x for name in ("plot", "eval", "serve", "lora", "export") for x in extras[name]),
    ]
    floors = dict(re.match(r"([\w.-]+)(?:\[.*?\])?>=([\w.]+)", text).groups() for text in asked if ">=" in text)
    floors.pop("torch")  # tested at its pin
    assert floors.items() <= tested.items()
