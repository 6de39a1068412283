"""Everything stays short enough to be read at once, functions say what they give, and tests what they check."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
FILES = [path for folder in ("src", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(code: str) -> list[Function]:
    """All functions of a module, with methods and inner ones."""
    return [node for node in ast.walk(ast.parse(code)) if isinstance(node, Function)]


def code_lines(function: Function) -> int:
    """Lines of a function from its name to its end, its docstring not counted."""
    first = function.body[0]
    said = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) else 0
    return function.end_lineno - function.lineno + 1 - said


def silent(code: str) -> list[str]:
    """Functions without a docstring; names that begin with `_` need none."""
    return [one.name for one in functions(code) if not one.name.startswith("_") and not ast.get_docstring(one)]


def idle(code: str) -> list[str]:
    """Tests that check nothing: no assertion, no error that is waited for, no helper whose name begins with `assert`."""
    return [
        one.name
        for one in functions(code)
        if one.name.startswith("test_")
        and not any(isinstance(node, ast.Assert) for node in ast.walk(one))
        and not re.search(r"\b(pytest\.raises|pytest\.warns|assert_\w+)\(", ast.unparse(one))
    ]


def test_no_file_has_more_than_400_lines():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lengths.items() if count > 400} == {}


@pytest.mark.parametrize("room", sorted(path.name for path in (SRC / "massmerge").iterdir() if path.is_dir()))
def test_functions_of_a_room_are_short_and_have_a_docstring(room):
    for path in sorted((SRC / "massmerge" / room).rglob("*.py")):
        code = path.read_text(encoding="utf-8")
        assert [one.name for one in functions(code) if code_lines(one) > 60] == [], path
        assert silent(code) == [], path


def test_an_inner_function_counts_and_a_docstring_is_no_code():
    code = 'def f():\n    """Says\n    it."""\n    def g():\n        return 1\n    return g\n'
    assert silent(code) == ["g"]
    assert [code_lines(one) for one in functions(code)] == [4, 2]


def test_every_test_checks_something():
    found = {path.name: idle(path.read_text(encoding="utf-8")) for path in FILES if path.name.startswith("test_")}
    assert {name: tests for name, tests in found.items() if tests} == {}
    assert idle("def test_a():\n    run()\ndef test_b():\n    assert run()\n") == ["test_a"]
