"""`mass calibrate --kind tuned`: an adapter of the first pass that is trained to name the task."""

import shutil

import pytest
import torch

import massmerge
from massmerge import InputError
from massmerge.model.calibrate import calibrate
from massmerge.model.load import load
from massmerge.model.route.first_pass import FirstPass
from massmerge.model.route.tuned import put_adapter
from massmerge.model.trees import shared_copy
from massmerge.model.tune import TuneOptions, Tuning, leave_out, read_rows
from massmerge.routing.tuned import TunedKind
from models import contents, text_bundle

WORDS = {"spam": "free prize call win", "topic": "team law vote gene", "mood": "sad happy good bad"}
SMALL = TuneOptions(rank=4, batch=64, inputs=5000, epochs=100, rate=3e-3)  # activations of the tiny model hardly differ

QUICK = TuneOptions(rank=2, batch=16, inputs=100)


def texts(task, count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    words = [*WORDS[task].split(), "the", "a"]
    return [" ".join(words[int(i)] for i in torch.randint(6, (5,), generator=draw)) for _ in range(count)]


@pytest.fixture(scope="module")
def inputs():
    return {task: texts(task, 20) for task in WORDS}


@pytest.fixture
def bundle(root, tmp_path):
    shutil.copytree(text_bundle(root), tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr("massmerge.model.calibrate.TuneOptions", lambda: SMALL)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("massmerge.model.calibrate.TuneOptions", lambda: QUICK)


def test_a_tuned_first_pass_names_the_task_and_leaves_the_second_pass_alone(bundle, inputs, small):
    before = massmerge.load(bundle)
    done = calibrate(bundle, inputs, kind="tuned")
    model = massmerge.load(bundle)
    asked = {task: texts(task, 10, seed=1) for task in WORDS}
    found = {task: [r.selected[0] for r in model.route(own)] for task, own in asked.items()}
    assert sum(task == one for task, several in found.items() for one in several) >= 24
    assert done.kind == "tuned" and done.inputs == dict.fromkeys(WORDS, 18) and done.after is not None
    for task, own in asked.items():
        given, expected = model.predict(own[:3], task=task), before.predict(own[:3], task=task)
        assert [p.logit for p in given] == pytest.approx([p.logit for p in expected], abs=1e-5)


def test_dense_weights_of_the_factors_give_what_was_trained(bundle, inputs):
    model = load(bundle, router="projection")
    tuning = Tuning(model, QUICK)
    rows, owners = read_rows(model.core, inputs, QUICK.tokens)
    tuning.train(rows, owners, lambda name: None)
    with torch.inference_mode():
        expected = tuning.logits(model.core.batch(rows[:6])).log_softmax(1)
    tree = shared_copy(model.core.base)
    put_adapter(tree, tuning.kept())
    voters = model.stages.voters
    router = TunedKind().load([v.name for v in voters], tuning.kept(), [])
    found = -router(FirstPass(tree, voters)(model.core.batch(rows[:6]))).opinions[0]
    assert torch.allclose(found, expected, atol=1e-4)


def test_training_again_gives_the_same_bytes(bundle, inputs, quick, tmp_path):
    shutil.copytree(bundle, tmp_path / "other")
    calibrate(bundle, inputs, kind="tuned")
    calibrate(tmp_path / "other", inputs, kind="tuned")
    assert contents(bundle) == contents(tmp_path / "other")


def test_progress_tells_the_steps_and_the_time_that_is_left(bundle, inputs, quick):
    said = []
    calibrate(bundle, inputs, kind="tuned", progress=said.append)
    steps = [name for name in said if name.startswith("tuned: step ")]
    assert len(steps) == QUICK.steps(54) and steps[-1] == f"tuned: step {len(steps)} of {len(steps)}, 0 s left"


def test_a_tenth_of_the_inputs_is_left_out_for_the_estimate(inputs):
    trained, asked = leave_out({"a": list(range(30)), "b": list(range(2000))})
    assert len(asked["a"]) == 3 and len(asked["b"]) == 100
    assert all(sorted([*trained[task], *asked[task]]) == list(range(n)) for task, n in (("a", 30), ("b", 2000)))
    assert leave_out({"a": [1] * 9, "b": [1] * 50})[1] == {"a": [], "b": []}


def test_few_inputs_are_seen_several_times_and_many_once():
    options = TuneOptions(batch=10, inputs=1000, epochs=20)
    assert options.steps(5) == 10 and options.steps(500) == 100 and options.steps(5000) == 500


def test_an_input_that_cannot_be_read_is_named_with_its_task(bundle, inputs, quick):
    with pytest.raises(InputError, match="inputs of topic: empty text"):
        calibrate(bundle, {**inputs, "topic": [*inputs["topic"], ""]}, kind="tuned")
