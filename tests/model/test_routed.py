"""Which tasks an input is routed to: by the voters, as told, or to none."""

import itertools
from collections import Counter

import pytest
import torch

import massmerge
from answers import assert_same_answers, bert_delta, bert_rows
from massmerge import InputError
from massmerge.model.route.first_pass import FirstPass
from models import FAMILIES, family_bundle, rows_of, with_options


@pytest.fixture(scope="module")
def one_voter(root, tmp_path_factory):
    """As `bert`, with one site and one vector of each input that decide."""
    folder = tmp_path_factory.mktemp("one_voter") / "bundle"
    return massmerge.load(with_options(family_bundle(root, "bert"), folder, router={"site": "M0", "token": "mean"}))


# Routing


def test_a_routing_has_residual_weight_and_rank_of_every_task(bert):
    routing = bert.route(bert_rows(1))[0]
    assert routing.residuals.keys() == routing.weights.keys() == routing.ranks.keys() == {"a", "b", "c"}
    assert sorted(routing.ranks.values()) == [1, 2, 3]
    best = min(routing.residuals, key=routing.residuals.get)
    assert routing.ranks[best] == 1
    assert routing.selected == [best]
    assert routing.site == "O0.mean M0.mean O1.mean M1.mean"
    assert abs(sum(routing.weights.values()) - 1) < 1e-6


def test_one_voter_gives_the_residual_itself(root, one_voter):
    rows = bert_rows(3)
    name = "encoder.layer.0.intermediate.dense.weight"
    for z, routing in zip(one_voter.activations(rows)[0].double(), one_voter.route(rows), strict=True):
        for task in ("a", "b", "c"):
            v = torch.linalg.svd(bert_delta(family_bundle(root, "bert"), task, name))[2][:8]
            assert abs(routing.residuals[task] - float((z - v.mT @ v @ z).norm())) < 1e-4


def test_several_sites_and_tokens_vote_by_the_sum_of_standardised_residuals(root, tmp_path):
    source = family_bundle(root, "vit")
    rows = rows_of(FAMILIES["vit"].make_inputs(4))

    def residuals(folder, **router):
        model = massmerge.load(with_options(source, tmp_path / folder, router=router))
        found = [list(r.residuals.values()) for r in model.route(rows)]
        return model.voters, torch.tensor(found, dtype=torch.float64)

    voters, together = residuals("all", site=["M0", "A1"], token="both")
    assert voters == ["M0.cls", "M0.mean", "A1.cls", "A1.mean"]
    total = 0
    for site, token in itertools.product(("M0", "A1"), ("cls", "mean")):
        one = residuals(f"{site}{token}", site=site, token=token)[1]
        total = total + (one - one.mean(1, keepdim=True)) / one.std(1, keepdim=True)
    assert torch.allclose(together, total, atol=2e-3)


def test_each_token_speaks_for_itself_and_the_mean_of_their_shares_of_residual_counts(root, tmp_path):
    options = {"site": "M0", "token": "each"}
    model = massmerge.load(with_options(family_bundle(root, "bert"), tmp_path / "bundle", router=options))
    base = FAMILIES["bert"].base.from_pretrained(family_bundle(root, "bert") / "base").eval()
    found = []
    base.encoder.layer[0].intermediate.dense.register_forward_pre_hook(lambda _, args: found.append(args[0][0]))
    name = "encoder.layer.0.intermediate.dense.weight"
    rows = [{"input_ids": torch.arange(5, 5 + n)} for n in (3, 6, 4)]  # padded to one length in the model
    for row, routing in zip(rows, model.route(rows), strict=True):
        with torch.inference_mode():
            base(input_ids=row["input_ids"][None])
        for task in ("a", "b", "c"):
            v = torch.linalg.svd(bert_delta(family_bundle(root, "bert"), task, name))[2][:8].float()
            shares = [float((z - v.mT @ (v @ z)).norm() / z.norm()) for z in found[-1]]
            assert abs(routing.residuals[task] - sum(shares) / len(shares)) < 1e-4


def test_models_route_by_the_mean_also_where_there_is_a_class_token(root, bert):
    assert bert.voters == ["O0.mean", "M0.mean", "O1.mean", "M1.mean"]
    assert massmerge.load(family_bundle(root, "vit")).voters == ["O0.mean"]


def test_route_batch_decides_once_for_all(one_voter):
    rows = bert_rows(9)
    assert len({p.task for p in one_voter.predict(rows)}) > 1
    found = one_voter.predict(rows, route="batch")
    assert len({p.task for p in found}) == 1
    assert len({tuple(p.routing.selected) for p in found}) == 1


def test_route_batch_runs_the_first_pass_on_a_few_inputs(bert, monkeypatch):
    seen = []
    run = FirstPass.__call__
    monkeypatch.setattr(FirstPass, "__call__", lambda self, b: (seen.append(len(b["input_ids"])), run(self, b))[1])
    bert.predict(bert_rows(20), route="batch", batch_size=20)
    assert seen[0] < 20


def test_route_batch_on_inputs_that_are_alike_answers_as_each_by_itself(bert):
    row = bert_rows(1)
    assert_same_answers(bert.predict(row * 6, route="batch"), bert.predict(row * 6))


def test_a_route_that_does_not_exist_is_refused(bert):
    with pytest.raises(InputError, match="route is 'input' or 'batch', not 'row'"):
        bert.predict(bert_rows(1), route="row")


# Tasks that are given


def test_a_given_task_skips_the_first_pass(bert, monkeypatch):
    monkeypatch.setattr(FirstPass, "__call__", lambda *_: pytest.fail("the first pass ran"))
    found = bert.predict(bert_rows(2), task="b")
    assert [p.task for p in found] == ["b", "b"]
    assert [p.routing.selected for p in found] == [["b"], ["b"]]


def test_a_list_of_tasks_restricts_the_choice(bert):
    favourite = Counter(p.task for p in bert.predict(bert_rows(9))).most_common(1)[0][0]
    others = {"a", "b", "c"} - {favourite}
    found = bert.predict(bert_rows(9), task=sorted(others))
    assert {p.task for p in found} <= others
    assert found[0].routing.weights.keys() == others


def test_an_unknown_task_is_refused_with_those_there_are(bert):
    for call in (bert.predict, bert.route, bert.embed):
        with pytest.raises(InputError, match=r"no task 'z'\. Choose from a, b, c\."):
            call(bert_rows(1), task=["a", "z"])


def test_an_empty_list_of_tasks_is_refused(bert):
    with pytest.raises(InputError, match=r"an empty list of tasks\. Choose from a, b, c\."):
        bert.predict(bert_rows(1), task=[])


# Abstention


def test_an_input_that_no_task_explains_better_than_asked_is_unknown(bert):
    found = bert.predict(bert_rows(4), unknown={"lift": 1e6})
    assert [(p.task, p.label, p.score, p.error) for p in found] == [(None, None, None, None)] * 4


def test_an_unknown_input_comes_with_the_evidence(bert):
    routing = bert.predict(bert_rows(1), unknown={"lift": 1e6})[0].routing
    plain = bert.route(bert_rows(1))[0]
    assert routing.selected == []
    assert routing.lift == plain.lift
    assert routing.residuals == plain.residuals


def test_known_and_unknown_inputs_of_a_batch_are_told_apart(bert):
    rows = bert_rows(9)
    lifts = [r.lift for r in bert.route(rows)]
    middle = sorted(lifts)[4]
    plain, found = bert.predict(rows), bert.predict(rows, unknown={"lift": middle})
    for lift, before, after in zip(lifts, plain, found, strict=True):
        assert after.task == (None if lift < middle else before.task)
        assert after.label == (None if lift < middle else before.label)


def test_the_lift_is_the_captured_share_over_that_of_a_random_subspace(root, one_voter):
    rows = bert_rows(3)
    name = "encoder.layer.0.intermediate.dense.weight"
    for z, routing in zip(one_voter.activations(rows)[0].double(), one_voter.route(rows), strict=True):
        v = torch.linalg.svd(bert_delta(family_bundle(root, "bert"), routing.selected[0], name))[2][:8]
        share = float((v @ z).square().sum() / z.square().sum())
        assert abs(routing.lift - share / (8 / 32)) < 1e-3


def test_voters_that_agree_less_than_asked_make_an_input_unknown(root):
    model, rows = massmerge.load(family_bundle(root, "vit")), rows_of(FAMILIES["vit"].make_inputs(6))
    agreements = [r.agreement for r in model.route(rows)]
    assert all(0 <= a <= 1 for a in agreements)
    middle = sorted(agreements)[3]
    found = model.predict(rows, unknown={"agreement": middle})
    assert [p.task is None for p in found] == [a < middle for a in agreements]


def test_the_recipe_can_say_when_an_input_is_unknown(root, tmp_path):
    model = massmerge.load(with_options(family_bundle(root, "bert"), tmp_path / "bundle", unknown={"lift": 1e6}))
    assert model.predict(bert_rows(1))[0].task is None
    assert model.predict(bert_rows(1), unknown={})[0].task is not None


def test_the_lift_of_a_batch_that_is_routed_as_one_is_the_mean_over_the_inputs_that_decide(root, one_voter):
    rows = bert_rows(3)
    found = one_voter.predict(rows, route="batch")[0].routing
    name = "encoder.layer.0.intermediate.dense.weight"
    v = torch.linalg.svd(bert_delta(family_bundle(root, "bert"), found.selected[0], name))[2][:8]
    z = one_voter.activations(rows)[0].double()
    shares = (z @ v.mT).square().sum(1) / z.square().sum(1)
    assert abs(found.lift - float(shares.mean()) / (8 / 32)) < 1e-4


def test_a_batch_that_is_routed_as_one_can_be_unknown(bert):
    assert [p.task for p in bert.predict(bert_rows(3), route="batch", unknown={"lift": 1e6})] == [None] * 3


def test_a_wrong_limit_is_refused_by_name(bert):
    with pytest.raises(InputError, match=r"unknown: lfit: .*It takes lift"):
        bert.predict(bert_rows(1), unknown={"lfit": 2.0})
