"""What a router will reach, estimated by cross-validation, and what is advised."""

import shutil

import pytest
import torch

import massmerge
from massmerge.linalg.intervals import Figure, mean_of, wilson
from massmerge.model.advice import advise
from massmerge.model.answers import Routing
from massmerge.model.calibrate import _first_good, calibrate
from massmerge.model.estimate import ConfusedPair, Estimate, estimate, folds
from models import text_bundle

OWNERS = torch.tensor([0] * 7 + [1] * 5 + [2] * 6)


def routed(*tasks):
    return [Routing({}, {}, [task], "") for task in tasks]


def test_every_input_is_asked_once_and_never_fitted_on_in_that_fold():
    asked = []
    for fitted, left_out in folds(OWNERS):
        assert sorted([*fitted.tolist(), *left_out.tolist()]) == list(range(len(OWNERS)))
        assert set(OWNERS[fitted].tolist()) == {0, 1, 2}
        asked += left_out.tolist()
    assert sorted(asked) == list(range(len(OWNERS)))


def test_the_smallest_task_limits_the_folds():
    assert len(list(folds(torch.tensor([0] * 9 + [1] * 3)))) == 3
    assert list(folds(torch.tensor([0] * 9 + [1]))) == []


def test_an_estimate_counts_each_task_and_where_its_inputs_go():
    found = estimate(["a", "b"], torch.tensor([0, 0, 0, 1]), routed("a", "b", "a", "b"))
    assert found.tasks == {"a": wilson(2, 3), "b": wilson(1, 1)}
    assert found.mean.value == pytest.approx(5 / 6)
    assert found.confused == [ConfusedPair("a", "b", pytest.approx(1 / 3))]


def test_the_interval_of_a_mean_is_narrower_than_those_of_its_figures():
    one = wilson(80, 100)
    found = mean_of([one] * 4)
    assert found.value == pytest.approx(0.8)
    assert found.high - found.low == pytest.approx((one.high - one.low) / 2)


def test_inputs_that_say_nothing_are_estimated_at_chance(root, tmp_path):
    # Each text is given to every task, so a router that remembered it would be right and one that was left without is not.
    bundle = shutil.copytree(text_bundle(root), tmp_path / "bundle")
    texts = ["win", "a happy song", "vote law", "free call", "the team"]
    found = calibrate(bundle, dict.fromkeys(massmerge.load(bundle).tasks, texts), kind="nearest")
    assert found.after.mean.value < 0.5


def given(value, **shares):
    figure = Figure(value, value, value)
    return Estimate(figure, dict.fromkeys("ab", figure), [ConfusedPair("a", "b", share) for share in shares.values()])


def test_good_routing_needs_no_advice():
    assert advise({"a": 9, "b": 9}, given(0.8), given(0.97), []) == []


def test_weak_tasks_with_few_inputs_need_more():
    assert any("more inputs of a" in line for line in advise({"a": 9, "b": 900}, given(0.6), given(0.8), []))


def test_pairs_that_share_labels_already_are_not_advised_to():
    lines = advise({"a": 900, "b": 900}, given(0.6), given(0.8, one=0.2), [])
    assert any("shared_labels" in line for line in lines)
    lines = advise({"a": 900, "b": 900}, given(0.6), given(0.8, one=0.2), [["a/x", "b/y"]])
    assert not any("shared_labels" in line for line in lines)


def test_a_calibration_that_gains_nothing_says_so():
    assert "gains nothing" in advise({"a": 9, "b": 9}, given(0.8), given(0.8), [])[0]


def test_one_input_a_task_cannot_be_left_out():
    assert "two or more inputs" in advise({"a": 1, "b": 1}, given(0.8), None, [])[0]


@pytest.mark.parametrize(("linear", "chosen"), [(0.9, "linear"), (0.81, "prototype")])
def test_a_router_is_left_for_another_only_if_that_is_better_by_a_standard_error(linear, chosen):
    figures = {"prototype": Figure(0.8, 0.76, 0.84), "linear": Figure(linear, linear - 0.04, linear + 0.04)}
    tried = {kind: Estimate(figure, {}, []) for kind, figure in figures.items()}
    assert _first_good(tried) == chosen
