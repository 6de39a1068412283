"""What `mass calibrate` says of confidence: the rule of a router, and limits below which to answer "none of these"."""

import shutil
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import massmerge
from massmerge import InputError
from massmerge.bundle.reader import Bundle
from massmerge.cli.main import main
from massmerge.merging.verify import verify_bundle
from massmerge.model.answers import Routing
from massmerge.model.calibrate import calibrate
from massmerge.model.limits import by_rule, fit_rule, typical_limit
from massmerge.model.route.decide import Votes, count_votes
from massmerge.routing.confidence import TEXTS
from models import text_bundle

WORDS = {"spam": "win free prize now call", "topic": "team match law vote gene", "mood": "sad happy bad good song"}


def inputs(count, seed=0):
    """Random texts of each task's words."""
    draw = torch.Generator().manual_seed(seed)
    return {
        task: [" ".join(words.split()[i] for i in torch.randint(5, (4,), generator=draw)) for _ in range(count)]
        for task, words in WORDS.items()
    }


@pytest.fixture(scope="module")
def calibrated(root, tmp_path_factory):
    """A calibrated bundle with limits, and what the calibration said."""
    bundle = tmp_path_factory.mktemp("limits") / "bundle"
    shutil.copytree(text_bundle(root), bundle)
    return bundle, calibrate(bundle, inputs(10), kind="linear", precision=0.3, write_limits=True)


def test_a_router_s_rule_is_fitted_kept_and_loaded(calibrated):
    bundle, done = calibrated
    assert done.rule is not None
    assert massmerge.load(bundle).stages.rule == done.rule
    assert massmerge.load(bundle, router="projection").stages.rule == TEXTS


def test_written_limits_are_the_bundle_s_from_then_on(calibrated):
    bundle, done = calibrated
    unknown = Bundle(bundle).recipe.unknown
    assert unknown.typicality == pytest.approx(done.limits.typicality, abs=1e-4)
    assert unknown.confidence == pytest.approx(done.limits.confidence, abs=1e-4)
    assert verify_bundle(bundle).ok


def test_limits_that_are_not_asked_for_are_not_written(root, tmp_path):
    bundle = shutil.copytree(text_bundle(root), tmp_path / "bundle")
    before = (bundle / "recipe.yaml").read_bytes()
    assert calibrate(bundle, inputs(10), kind="prototype").limits.typicality is not None
    assert (bundle / "recipe.yaml").read_bytes() == before


def test_a_calibrated_bundle_says_how_typical_inputs_are(calibrated):
    own, foreign = massmerge.load(calibrated[0]).route(["win free prize now", "a a a a a a a a"])
    assert foreign.typicality < own.typicality <= 1


def test_the_limit_for_a_precision_keeps_it_as_far_as_heads_are_right(calibrated):
    bundle, done = calibrated
    assert 0 < done.limits.answered <= 1
    given = [p for p in massmerge.load(bundle).predict(inputs(10, seed=1)["spam"]) if p.task is not None]
    assert all(p.confidence >= round(done.limits.confidence, 4) for p in given)


def test_a_precision_that_no_limit_reaches_is_said(calibrated):
    bundle, _ = calibrated
    found = calibrate(bundle, inputs(10), kind="prototype", precision=0.9999)
    assert found.limits.confidence is None
    assert found.limits.unknown().keys() == {"typicality"}


@pytest.mark.parametrize("precision", [0.0, 1.0, 95])
def test_a_precision_is_a_share(calibrated, precision):
    with pytest.raises(InputError, match="precision is a share between 0 and 1"):
        calibrate(calibrated[0], inputs(2), precision=precision)


def test_the_command_shows_limits_and_writes_them(root, tmp_path):
    bundle = shutil.copytree(text_bundle(root), tmp_path / "bundle")
    given = []
    for task, texts in inputs(10).items():
        (tmp_path / f"{task}.txt").write_text("\n".join(texts))
        given += ["--inputs", f"{task}={tmp_path / task}.txt"]
    found = CliRunner().invoke(main, ["calibrate", str(bundle), *given, "--precision", "0.3", "--write-limits"])
    assert found.exit_code == 0, found.output
    assert "limit for 30 % right answers: confidence" in found.output
    assert "(gives up 5 % of the tasks' own inputs)" in found.output
    assert Bundle(bundle).recipe.unknown.typicality > 0


def test_probabilities_by_a_rule_are_those_of_a_decision_with_it(calibrated):
    stages = massmerge.load(calibrated[0], router="projection").stages
    scores = [torch.rand(6, 3, generator=torch.Generator().manual_seed(0)) for _ in stages.voters]
    rule = replace(TEXTS, offset=-0.4, lead=0.6)
    plain, expected = (
        count_votes(Votes(stages.voters, scores), replace(stages.choice(), rule=one))
        for one in (TEXTS.of_probabilities(), rule)
    )
    for one, other in zip(plain, expected, strict=True):
        assert by_rule(one, rule).probabilities == pytest.approx(other.probabilities)


def test_a_router_that_is_often_wrong_is_less_sure():
    evidence = Routing({}, {}, ["a"], "", probabilities={"a": 0.95, "b": 0.05})
    rules = [fit_rule(TEXTS, [evidence] * 100, [i < right for i in range(100)]) for right in (95, 60)]
    sure, unsure = (by_rule(evidence, rule).probabilities["a"] for rule in rules)
    assert sure == pytest.approx(0.95, abs=0.02)
    assert unsure == pytest.approx(0.6, abs=0.05)


def test_few_inputs_give_no_limit_of_typicality():
    assert typical_limit(torch.rand(19)) is None
    assert typical_limit(torch.linspace(0, 1, 101)) == pytest.approx(0.05)
