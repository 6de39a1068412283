"""`mass add` and `mass remove` keep a calibrated router, by what the bundle keeps of its inputs."""

import json
import shutil

import pytest
from click.testing import CliRunner

import massmerge
from massmerge import InputError
from massmerge.bundle.reader import Bundle
from massmerge.cli.main import main
from massmerge.model.calibrate import calibrate
from models import text_bundle

INPUTS = {
    "spam": ["win a free prize now", "free call win win", "call now prize"],
    "topic": ["the team won the match", "vote law party", "cell gene star"],
    "mood": ["so sad and bad", "happy happy good", "a bad sad song"],
}


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def two(root, tmp_path):
    """A bundle of two tasks whose router is linear, and how the expert of a third is added."""
    return without(root, tmp_path, "spam")


def without(root, tmp_path, third):
    out, home = tmp_path / "two", text_bundle(root)
    shutil.copytree(home, out)
    assert run("remove", out, third).exit_code == 0
    calibrate(out, {task: INPUTS[task] for task in INPUTS if task != third}, kind="linear")
    (tmp_path / "new.txt").write_text("\n".join(INPUTS[third]))
    return out, f"{third}={home.parent / next(t.expert for t in Bundle(home).recipe.tasks if t.name == third)}"


def routed(bundle):
    model = massmerge.load(bundle)
    return [routing.selected[0] for task in model.tasks for routing in model.route(INPUTS[task])]


def test_an_added_task_with_inputs_joins_the_calibrated_router(two, tmp_path):
    out, spam = two
    done = run("add", out, spam, "--inputs", f"spam={tmp_path / 'new.txt'}", "--json")
    assert done.exit_code == 0, done.output
    assert "dropped" not in done.stderr and "not fitted" not in done.stderr
    found = json.loads(done.stdout)["calibration"]
    assert found["kind"] == Bundle(out).router_kind == "linear"
    assert found["replayed"] == ["topic", "mood"] and found["inputs"] == {"topic": 3, "mood": 3, "spam": 3}
    assert routed(out) == ["topic"] * 3 + ["mood"] * 3 + ["spam"] * 3


def test_without_inputs_an_addition_says_that_those_of_the_new_task_suffice(two):
    out, spam = two
    done = run("add", out, spam)
    assert done.exit_code == 0 and "Inputs of spam suffice to fit one again" in done.stderr
    assert Bundle(out).router_kind == "projection"
    assert calibrate(out, {"spam": INPUTS["spam"]}, kind="linear").replayed == ("topic", "mood")
    assert routed(out) == ["topic"] * 3 + ["mood"] * 3 + ["spam"] * 3


def test_an_addition_that_changes_who_votes_says_that_all_tasks_need_inputs_again(root, tmp_path):
    out, mood = without(root, tmp_path, "mood")  # whose expert changes attention alone
    done = run("add", out, mood, "--inputs", f"mood={tmp_path / 'new.txt'}")
    assert done.exit_code == 0, done.output
    assert "not fitted again: no inputs for spam, topic" in done.stderr and "other sites" in done.stderr
    assert massmerge.load(out).predict("so sad")[0].task in INPUTS


def test_a_removal_keeps_a_calibrated_router_without_any_input(root, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(text_bundle(root), out)
    calibrate(out, INPUTS, kind="linear")
    done = run("remove", out, "topic")
    assert done.exit_code == 0 and "dropped" not in done.stderr
    assert Bundle(out).router_kind == "linear"
    assert routed(out) == ["spam"] * 3 + ["mood"] * 3


def test_a_task_of_which_nothing_is_kept_still_needs_inputs(two):
    out, spam = two
    assert run("add", out, spam).exit_code == 0
    with pytest.raises(InputError, match=r"no inputs for spam\. Every task needs some"):
        calibrate(out, {"topic": INPUTS["topic"]})


def test_inputs_of_a_task_that_is_not_added_are_refused(two, tmp_path):
    out, spam = two
    done = run("add", out, spam, "--inputs", f"mood={tmp_path / 'new.txt'}")
    assert done.exit_code == 2 and "inputs of mood: not among the tasks that are added, spam" in done.stderr
