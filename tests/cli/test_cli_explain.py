"""`mass explain`: why an input is answered as it is, in the terminal, as a picture, as data."""

import json
import os

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import massmerge
from massmerge.cli.main import main
from massmerge.model.explain import explain
from models import image_bundle, text_bundle, with_options


@pytest.fixture(scope="module")
def text(root):
    return text_bundle(root)


def run(*arguments, stdin=None):
    return CliRunner().invoke(main, ["explain", *map(str, arguments)], input=stdin)


def line_of(output, start):
    return next(line for line in output.splitlines() if line.startswith(start))


# In the terminal


def test_the_answer_comes_first(text):
    expected = massmerge.load(text).predict("win a prize")[0]
    first = run(text, "win a prize").output.splitlines()[0]
    assert first == f"{expected.task}: {expected.label} ({expected.score:.3f})"


def test_every_task_has_its_residual_its_weight_and_a_bar_as_long(text):
    output = run(text, "win a prize").output
    routing = massmerge.load(text).route("win a prize")[0]
    for task, weight in routing.weights.items():
        line = line_of(output.split("\n\n", 1)[1], task)
        assert f"{weight:.3f}" in line
        assert f"{routing.residuals[task]:.3f}" in line
        assert line.count("█") == round(30 * weight)
        assert line.count("█") + line.count("·") == 30
        assert line.endswith("selected") == (task in routing.selected)


def test_tasks_stand_in_the_order_of_their_weights(text):
    routing = massmerge.load(text).route("win a prize")[0]
    lines = run(text, "win a prize").output.split("\n\n")[1].splitlines()[1:]
    assert [line.split()[0] for line in lines] == sorted(routing.weights, key=lambda t: -routing.weights[t])


def test_voters_lift_and_agreement_are_told(text):
    output = run(text, "win a prize").output
    routing = massmerge.load(text).route("win a prize")[0]
    assert f"voters: {routing.site}" in output
    assert f"holds {routing.lift:.2f} times what a random subspace of its size would" in output
    assert f"agreement of the voters: {routing.agreement:.0%}" in output


def test_each_head_of_the_set_shows_its_best_labels(root, here):
    bundle = with_options(text_bundle(root), here / "bundle", router={"top_k": 3, "threshold": 0.0})
    output = run(bundle, "win a prize", "--top", "2").output
    table = output[output.index("head") :].split("\n\n")[0].splitlines()[1:]
    assert sorted(line.split()[0] for line in table) == ["mood", "mood", "spam", "spam", "topic", "topic"]


def test_it_is_told_where_the_time_went(text):
    line = line_of(run(text, "win a prize").output, "time: ")
    assert all(f"{step} " in line for step in ("first pass", "routing", "second pass", "heads"))


def test_an_unknown_input_is_explained_without_heads(root, here):
    bundle = with_options(text_bundle(root), here / "bundle", unknown={"lift": 1e6})
    output = run(bundle, "win a prize").output
    assert output.startswith("unknown: no task explains this input well enough")
    assert "head" not in output.split("time:")[0]
    assert "selected" not in output


def test_a_given_task_is_explained_without_residuals(text):
    output = run(text, "win a prize", "--task", "topic").output
    assert output.startswith("topic: ")
    assert "voters: none: the task was given" in output


def test_an_image_is_explained(root, here):
    Image.fromarray(np.zeros((40, 40, 3), dtype=np.uint8)).save(here / "a.png")
    assert run(image_bundle(root), "a.png").output[:2] in ("a:", "b:")


def test_quiet_prints_nothing(text):
    assert run(text, "win", "-q").output == ""


# As data


def test_json_holds_prediction_and_heads(text):
    data = json.loads(run(text, "win a prize", "--json").output)
    prediction = data["prediction"]
    best = data["heads"][prediction["task"]][0]
    assert (best["label"], best["score"]) == (prediction["label"], prediction["score"])
    assert prediction["routing"]["residuals"].keys() == {"spam", "topic", "mood"}


def test_heads_hold_as_many_labels_as_asked_for_best_first(text):
    model = massmerge.load(text)
    found = explain(model, "vote", top=3, task="topic").heads
    assert list(found) == ["topic"]
    scores = [answer.score for answer in found["topic"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


# As a picture


@pytest.mark.parametrize("options", [[], ["--task", "topic"]])
def test_the_picture_is_drawn_and_its_place_told(text, here, options):
    done = run(text, "win a prize", "--plot", "x.png", *options)
    assert done.exit_code == 0, done.output
    assert "plot in x.png" in done.output
    with Image.open("x.png") as image:
        assert min(image.size) > 300
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50


def test_the_picture_of_an_unknown_input_is_drawn(root, here):
    bundle = with_options(text_bundle(root), here / "bundle", unknown={"lift": 1e6})
    assert run(bundle, "win", "--plot", "x.svg").exit_code == 0
    assert "<svg" in (here / "x.svg").read_text()


def test_a_picture_of_an_unknown_kind_is_an_error_of_the_call(text, here):
    done = run(text, "win", "--plot", "x.xyz")
    assert done.exit_code == 2
    assert "x.xyz: cannot be drawn. Name a file that ends in .png, .svg or .pdf." in done.output


def test_a_picture_of_a_text_with_signs_of_mathematics_is_drawn(text, here):
    assert run(text, "win $5 or $\\frac$ now", "--plot", "x.png").exit_code == 0


def test_a_picture_of_a_file_whose_name_is_not_utf_8_is_drawn(root, here):
    name = os.fsdecode(b"\xffx.png")
    Image.new("RGB", (40, 40)).save(name)
    assert run(image_bundle(root), name, "--plot", "x.png").exit_code == 0


# A table


def test_the_one_row_of_a_table_is_explained(text, here):
    (here / "t.csv").write_text("id,body\n1,win a prize\n")
    found = json.loads(run(text, "t.csv", "--column", "body", "--json").output)
    direct = json.loads(run(text, "win a prize", "--json").output)
    assert found["heads"] == direct["heads"]


def test_a_table_of_several_rows_is_refused(text, here):
    (here / "t.csv").write_text("body\nwin\nfree\n")
    done = run(text, "t.csv", "--column", "body")
    assert done.exit_code == 2
    assert "t.csv: holds 2 inputs; explain one at a time." in done.output


# What is refused


def test_several_inputs_are_refused(text, here):
    (here / "a.txt").write_text("win\nfree\n")
    done = run(text, "a.txt")
    assert done.exit_code == 2
    assert "a.txt: holds 2 inputs; explain one at a time." in done.output


def test_an_input_that_cannot_be_read_is_refused(text):
    done = run(text, "gone.txt")
    assert done.exit_code == 2
    assert "gone.txt: no such file." in done.output


def test_no_input_on_standard_input_is_refused(text):
    done = run(text, "-", stdin="")
    assert done.exit_code == 2
    assert "-: holds 0 inputs" in done.output


def test_an_unknown_task_is_refused_with_those_there_are(text):
    done = run(text, "win", "--task", "weather")
    assert done.exit_code == 2
    assert "Choose from spam, topic, mood." in done.output


def test_what_is_no_bundle_is_refused(here):
    done = run(here, "win")
    assert done.exit_code == 2
    assert "not a bundle" in done.output
