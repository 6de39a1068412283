"""The command as a whole: its list of verbs, and how soon it is there."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

import massmerge
from massmerge.cli.main import VERBS, main


@pytest.mark.parametrize("name", VERBS)
def test_the_list_of_verbs_says_of_each_what_it_says_itself(name):
    verb = main.get_command(None, name)
    assert verb.name == name
    assert verb.get_short_help_str(1000) == VERBS[name]


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["no such verb"]])
def test_version_help_and_a_wrong_verb_wait_for_no_library(arguments):
    code = """
import sys
from massmerge.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    assert not {"torch", "transformers"} & set(sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def test_a_slip_of_the_pen_is_told_the_verb_that_was_meant():
    result = CliRunner().invoke(main, ["prdict"])
    assert result.exit_code == 2
    assert "No such command 'prdict'. Did you mean 'predict'?" in result.stderr


def test_the_public_names_are_there_and_no_others():
    assert dir(massmerge) == sorted(massmerge.__all__)
    assert all(getattr(massmerge, name) for name in massmerge.__all__)
    assert callable(massmerge.merge)  # and not a module of that name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = massmerge.nothing
