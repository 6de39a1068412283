"""Every verb takes `--device` and `--dtype`, or says why it does not."""

import pytest
from click.testing import CliRunner

from massmerge.cli.main import NOT_PLACED, VERBS, main


@pytest.mark.parametrize("option", ["--device", "--dtype"])
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_the_option_or_says_why_it_does_not(verb, option):
    command = main.get_command(None, verb)
    arguments = ["x" for p in command.params if p.param_type_name == "argument" and p.required]
    if any(option in p.opts for p in command.params):
        assert verb not in NOT_PLACED or (verb, option) == ("verify", "--device")
        return
    done = CliRunner().invoke(main, [verb, *arguments, option, "cpu"])
    assert done.exit_code == 2
    assert f"mass {verb} has no {option}: {NOT_PLACED[verb]}" in " ".join(done.stderr.split())


def test_another_wrong_option_is_refused_as_such():
    done = CliRunner().invoke(main, ["export", "x", "y", "--devcie", "cpu"])
    assert done.exit_code == 2 and "has no" not in done.stderr and "--devcie" in done.stderr
