"""The public surface: every verb of the command is a function of `massmerge` with the same options."""

import ast
import inspect
from collections import defaultdict
from pathlib import Path

import pytest
from click import Group

import massmerge
from massmerge.cli.main import VERBS, main

SRC = Path(massmerge.__file__).parent
# Verbs whose function has another name. The last two run a process and are no function.
FUNCTIONS = {
    "plan": massmerge.make_plan,
    "predict": massmerge.Model.predict,
    "generate": massmerge.Model.generate,
    "eval": massmerge.evaluate,
}
PROCESSES = ("serve", "demo")
# Options of the terminal: what is printed, and which files rows are read from or answers written to.
TERMINAL = {"as_json", "quiet", "verbose", "column", "plot", "dry_run", "strict", "listed"}
# Parameters of another name, or of the function that comes before (`load`, `choose_scale`) or beside (`Model.sites`).
OTHER_NAMES = {
    "plan": {"tensors": "Plan.tensors"},
    "merge": {"suite": "choose_scale", "limit": "choose_scale", "dtype": "choose_scale; calibrate"},
    "predict": {
        "bundle": "load",
        "cache": "load",
        "device": "load",
        "dtype": "load",
        "tasks": "task",
        "out": "a list",
        "wanted": "a list",
        "engine": "Predictor",
        "workers": "Predictor",
    },
    "generate": {
        "bundle": "load",
        "cache": "load",
        "device": "load",
        "dtype": "load",
        "tasks": "task",
        "max_new_tokens": "options",
        "given": "options",
        "stream": "Model.generate_stream",
        "out": "a list",
        "engine": "Predictor",
        "workers": "Predictor",
        "chat": "messages",
        "system": "messages",
    },
    "explain": {"bundle": "model", "tasks": "task", "device": "load", "dtype": "load"},
    "inspect": {"sites": "Model.sites"},
    "add": {"inputs": "Addition.with_inputs; calibrate", "dtype": "calibrate"},
    "remove": {"device": "calibrate", "dtype": "calibrate"},
    "adapt": {"bundle": "path"},
    "calibrate": {"bundle": "path"},
    "head": {"named": "templates"},
}


def options_of(verb: str) -> list[str]:
    assert isinstance(main, Group)
    command = main.get_command(None, verb)
    return [parameter.name for parameter in command.params]


def function_of(verb: str):
    return FUNCTIONS.get(verb) or getattr(massmerge, verb)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in PROCESSES])
def test_every_verb_is_a_function_with_the_same_options(verb):
    parameters = inspect.signature(function_of(verb)).parameters
    others = OTHER_NAMES.get(verb, {})
    wanted = [option for option in options_of(verb) if option not in TERMINAL | others.keys()]
    assert [option for option in wanted if option not in parameters] == []


@pytest.mark.parametrize("verb", OTHER_NAMES)
def test_other_names_are_still_needed(verb):
    parameters = inspect.signature(function_of(verb)).parameters
    assert all(option in options_of(verb) and option not in parameters for option in OTHER_NAMES[verb])


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in PROCESSES])
def test_defaults_of_the_command_are_those_of_the_function(verb):
    parameters = inspect.signature(function_of(verb)).parameters
    for option in main.get_command(None, verb).params:
        if option.name in parameters and not option.required and option.name not in OTHER_NAMES.get(verb, {}):
            own, given = parameters[option.name].default, option.to_info_dict()["default"]
            assert given in (None, (), []) or str(own) == str(given), option.name


@pytest.mark.parametrize("name", [name for name in massmerge.__all__ if not name.startswith("__")])
def test_public_names_have_a_docstring(name):
    assert inspect.getdoc(getattr(massmerge, name))


def test_no_two_public_classes_have_one_name():
    found = defaultdict(list)
    for path in SRC.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(SRC)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
