"""The house: which folder may import which, and who spells the names inside a bundle."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "massmerge"
# A folder imports only what stands on an earlier line, and itself. `merging` and `model` share a line: neither knows
# the other.
FLOORS = (
    ("errors",),
    ("io", "linalg"),
    ("recipe", "engines"),
    ("checkpoints", "routing"),
    ("bundle",),
    ("merging", "model"),
    ("evaluation",),
    ("research", "serve"),
    ("cli",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# What only bundle/ may write: folders and files inside a bundle, as they would stand in a path.
SPELLED = re.compile(
    r"""/ "(?:base|processor|tasks|head|labels\.json|mass\.json)"|"(?:base|processor|tasks)/|factors\.safetensors"""
    r"""|f"tasks/|mass_recipe|"mass\.json\""""
)


def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def rooms_in(code: str) -> set[str]:
    """The rooms that some code imports from, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "massmerge":
                names = [f"massmerge.{alias.name}" for alias in node.names if alias.name in FLOOR]
        found |= {name.split(".")[1] for name in names if name.startswith("massmerge.")}
    return found


def imported_rooms(path: Path) -> set[str]:
    """The other rooms that a module imports from."""
    return rooms_in(path.read_text(encoding="utf-8")) - {room_of(path)}


def test_the_package_has_few_rooms():
    names = {path.name for path in SRC.iterdir() if path.name not in ("__pycache__", "py.typed")}
    assert names == {"__init__.py", *(n if (SRC / n).is_dir() else f"{n}.py" for n in FLOOR)} and len(names) <= 15


@pytest.mark.parametrize("room", FLOOR)
def test_a_room_imports_only_from_floors_below(room):
    wrong = [
        f"{path.relative_to(SRC)} imports {other}"
        for path in modules()
        if room_of(path) == room
        for other in imported_rooms(path)
        if FLOOR[other] >= FLOOR[room]
    ]
    assert wrong == []


def test_research_is_imported_by_the_command_alone():
    """The public surface names it for type checkers and imports it when it is used."""
    assert {room_of(path) for path in modules() if "research" in imported_rooms(path)} == {"__init__", "cli"}


def test_the_public_surface_imports_no_room():
    code = "import sys, massmerge; sys.exit(any(name.startswith('massmerge.') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_only_the_bundle_spells_the_names_inside_it():
    outside = [path for path in modules() if room_of(path) not in ("bundle", "cli")]
    found = {str(path.relative_to(SRC)): SPELLED.findall(path.read_text(encoding="utf-8")) for path in outside}
    assert {name: spelled for name, spelled in found.items() if spelled} == {}


def test_the_manifest_is_read_without_transformers():
    code = "import sys, massmerge.bundle.manifest; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_an_import_inside_of_a_function_counts():
    code = "def f():\n    from massmerge.cli.main import main\n    import massmerge.model.load"
    assert rooms_in(code) == {"cli", "model"}
