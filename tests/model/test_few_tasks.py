"""Few tasks, equal tasks, tasks that change nothing."""

import shutil

import numpy as np
import pytest
import torch

import massmerge
from answers import bert_rows
from changes import write_adapter
from models import FAMILIES, family_bundle, logits_of, make_bundle, with_options, write_recipe, write_shifted


def test_a_bundle_of_one_task_always_answers_with_it(tmp_path):
    options = {"site": "M0", "token": "mean"}
    model = massmerge.load(make_bundle(tmp_path, "bert", {"only": 3}, merge={"rank": 4}, router=options))
    assert {p.task for p in model.predict(bert_rows(4))} == {"only"}
    routing = model.route(bert_rows(1))[0]
    assert routing.weights == {"only": 1.0}
    assert routing.residuals["only"] > 0


def test_two_tasks_are_told_apart_by_the_lesser_residual(tmp_path):
    model = massmerge.load(make_bundle(tmp_path, "bert", {"a": 2, "b": 2}, merge={"rank": 4}))
    for routing in model.route(bert_rows(6)):
        best = min(routing.residuals, key=routing.residuals.get)
        assert routing.selected == [best]
        assert 0.5 < routing.weights[best] < 1


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Two tasks with the same expert, and one that changes nothing where inputs are routed."""
    folder = tmp_path_factory.mktemp("odd")
    base = FAMILIES["bert"].make_base()
    base.save_pretrained(folder / "base")
    torch.manual_seed(3)
    everywhere = {n: torch.randn_like(p) * 0.02 for n, p in base.named_parameters()}
    write_shifted(folder / "one", "bert", base, everywhere)
    write_shifted(folder / "two", "bert", base, everywhere)
    late = {n: d for n, d in everywhere.items() if n.startswith("encoder.layer.1.output")}
    write_shifted(folder / "late", "bert", base, late)
    massmerge.merge(write_recipe(folder, ["one", "two", "late"], rank=4), folder / "bundle")
    return folder / "bundle"


def test_identical_experts_share_the_weight_and_the_first_in_the_recipe_answers(odd):
    for routing in massmerge.load(odd).route(bert_rows(4)):
        assert abs(routing.weights["one"] - routing.weights["two"]) < 1e-5
        assert routing.selected == ["one"]


@pytest.mark.parametrize("score", ["residual", "mahalanobis"])
def test_a_second_task_of_one_expert_changes_nothing_of_the_others_routing(tmp_path, score):
    base = FAMILIES["bert"].make_base()
    base.save_pretrained(tmp_path / "base")
    for seed, name in enumerate("abc"):
        torch.manual_seed(seed)
        write_shifted(
            tmp_path / name, "bert", base, {n: torch.randn_like(p) * 0.02 for n, p in base.named_parameters()}
        )
    shutil.copytree(tmp_path / "b", tmp_path / "twin")
    routings = []
    for names in (["a", "b", "c"], ["a", "b", "twin", "c"]):
        together = "".join(names)
        merged = massmerge.merge(write_recipe(tmp_path, names, name=f"{together}.yaml", rank=4), tmp_path / together)
        changed = with_options(merged, tmp_path / f"{together}-changed", router={"score": score})
        routings.append(massmerge.load(changed).route(bert_rows(6)))
    for plain, found in zip(*routings, strict=True):
        assert found.selected == plain.selected
        assert found.margin == pytest.approx(plain.margin, abs=1e-4)
        assert found.lift == pytest.approx(plain.lift, abs=1e-4)
        for name in ("a", "b", "c"):
            assert found.residuals[name] == pytest.approx(plain.residuals[name], abs=1e-3)
            assert found.weights[name] == pytest.approx(plain.weights[name], abs=1e-4)
        assert found.weights["twin"] == found.weights["b"]


def test_identical_experts_in_one_set_give_finite_answers(odd, tmp_path):
    options = {"top_k": 3, "threshold": 0.0}
    model = massmerge.load(with_options(odd, tmp_path / "bundle", router=options))
    for prediction in model.predict(bert_rows(4), task=["one", "two"], top=99):
        assert sorted(prediction.routing.selected) == ["one", "two"]
        assert all(np.isfinite(value) for value in logits_of(prediction).values())


def test_a_task_that_changes_nothing_at_the_site_is_never_the_best_there(odd):
    for routing in massmerge.load(odd).route(bert_rows(4)):
        assert routing.ranks["late"] == 3
        assert np.isfinite(routing.residuals["late"])


def test_tasks_that_all_change_nothing_at_the_site_share_the_weight(odd, tmp_path):
    path = "encoder.layer.0.output.dense"
    model = massmerge.load(with_options(odd, tmp_path / "bundle", router={"site": path}))
    routing = model.route(bert_rows(1), task=["late"])[0]
    assert routing.weights == {"late": 1.0}
    assert routing.lift == 0.0


@pytest.mark.parametrize("score", ["residual", "l1", "mahalanobis", "energy"])
def test_an_image_of_zeros_is_answered_without_nan(root, tmp_path, score):
    bundle = with_options(family_bundle(root, "vit"), tmp_path / "bundle", router={"score": score})
    prediction = massmerge.load(bundle).predict(torch.zeros(3, 32, 32))[0]
    numbers = [prediction.score, prediction.logit, *prediction.routing.residuals.values()]
    assert prediction.task in ("a", "b", "c")
    assert all(np.isfinite([*numbers, *prediction.routing.weights.values(), prediction.routing.lift]))


@pytest.mark.parametrize("score", ["residual", "l1", "mahalanobis", "energy"])
def test_every_score_gives_weights_that_sum_to_1(root, tmp_path, score):
    bundle = with_options(family_bundle(root, "bert"), tmp_path / "bundle", router={"score": score})
    for routing in massmerge.load(bundle).route(bert_rows(3)):
        assert abs(sum(routing.weights.values()) - 1) < 1e-5


@pytest.mark.parametrize(
    ("targets", "kinds"), [(["query", "key", "value", "dense"], "AOMD"), (["query", "value"], "A")]
)
def test_adapters_with_random_starts_of_their_own_are_compared_with_random_words(tmp_path, targets, kinds):
    FAMILIES["bert"].make_base().save_pretrained(tmp_path / "base")
    for seed, name in enumerate("abc"):
        torch.manual_seed(seed)
        options = {"target_modules": targets, "task_type": "SEQ_CLS"}
        write_adapter(tmp_path, name, FAMILIES["bert"].expert, seed, **options)
    model = massmerge.load(massmerge.merge(write_recipe(tmp_path, list("abc")), tmp_path / "out"))
    assert {voter[0] for voter in model.voters} == set(kinds)
    routings = model.route(bert_rows(20))
    assert np.mean([routing.lift for routing in routings]) == pytest.approx(
        1.2, abs=0.2
    )  # the best of three, by few voters
    assert len({routing.selected[0] for routing in routings}) == 3  # none holds more of everything
