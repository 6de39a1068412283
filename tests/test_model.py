"""From input to answer: what a loaded bundle gives, against the original experts and dense merges."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn.functional import pad
from transformers import AutoTokenizer

import massmerge
from massmerge import InputError
from massmerge.answers import rank_answers
from massmerge.recipe import AnswerOptions
from models import (
    FAMILIES,
    backbone_of,
    dense_changes,
    dense_expert,
    family_bundle,
    image_bundle,
    logits_of,
    make_bundle,
    rows_of,
    text_bundle,
    with_options,
    write_family,
    write_recipe,
    write_shifted,
)
from naive import relative_error, tsv_merge

CLASSIFIERS = [name for name in FAMILIES if name not in ("t5", "clip")]
TEXTS = ["win a free prize now", "the team won the match", "a sad song", "vote on the new law", "happy"]


@pytest.fixture(scope="module")
def bert(root):
    return massmerge.load(family_bundle(root, "bert"))


@pytest.fixture(scope="module")
def one_voter(root, tmp_path_factory):
    """As `bert`, with one site and one vector of each input that decide."""
    folder = tmp_path_factory.mktemp("one_voter") / "bundle"
    return massmerge.load(with_options(family_bundle(root, "bert"), folder, router={"site": "M0", "token": "mean"}))


@pytest.fixture(scope="module")
def text(root):
    return massmerge.load(text_bundle(root))


def bert_rows(count=6, seed=0):
    return rows_of(FAMILIES["bert"].make_inputs(count, seed))


def logits(prediction, task, labels):
    found = logits_of(prediction)
    return torch.tensor([found[task, f"LABEL_{i}"] for i in range(labels)])


def features_of(name, model, inputs):
    """The features of a dense backbone, as the library documents them."""
    with torch.inference_mode():
        if name == "t5":
            return model.encoder(**inputs).last_hidden_state.mean(1)
        output = model(**inputs)
    pooled = getattr(output, "pooler_output", None)
    if pooled is not None:
        return pooled
    return output.last_hidden_state.mean(1) if FAMILIES[name].text else output.last_hidden_state[:, 0]


# Against the original experts


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_one_expert_at_full_rank_answers_with_its_own_logits(tmp_path, name):
    bundle = make_bundle(tmp_path, name, {"only": 5}, merge={"rank": 32})
    inputs = FAMILIES[name].make_inputs(4)
    expert = FAMILIES[name].expert.from_pretrained(tmp_path / "only").eval()
    with torch.inference_mode():
        expected = expert(**inputs).logits
    predictions = massmerge.load(bundle).predict(rows_of(inputs), top=5)
    found = torch.stack([logits(p, "only", 5) for p in predictions])
    assert float((found - expected).abs().max()) < 1e-4
    assert [p.label for p in predictions] == [f"LABEL_{i}" for i in expected.argmax(1)]
    assert torch.allclose(torch.tensor([p.score for p in predictions]), expected.softmax(1).amax(1), atol=1e-4)


# Against dense merges


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("tasks", [["b"], ["a", "c"], ["a", "b", "c"]], ids="-".join)
def test_a_selected_set_answers_as_its_dense_tsv_merge(root, tmp_path, name, tasks):
    source = family_bundle(root, name)
    bundle = with_options(source, tmp_path / "bundle", router={"top_k": 3, "threshold": 0.0})
    inputs = FAMILIES[name].make_inputs(3)
    predictions = massmerge.load(bundle).predict(rows_of(inputs), task=tasks, top=99)
    assert all(sorted(p.routing.selected) == tasks for p in predictions)
    for head in tasks:
        with torch.inference_mode():
            expected = dense_expert(source, name, tasks, head)(**inputs).logits
        found = torch.stack([logits(p, head, expected.shape[1]) for p in predictions])
        assert relative_error(found, expected) < 1e-4
        if len(tasks) == 1:
            assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tasks", [["b"], ["a", "c"], ["a", "b", "c"]], ids="-".join)
def test_the_features_of_a_selected_set_are_those_of_its_dense_tsv_merge(root, tmp_path, name, tasks):
    source = family_bundle(root, name)
    bundle = with_options(source, tmp_path / "bundle", router={"top_k": 3, "threshold": 0.0})
    inputs = FAMILIES[name].make_inputs(3)
    dense = FAMILIES[name].base.from_pretrained(source.parent / "base").eval()
    dense.load_state_dict(dense_changes(source, dense, tasks, tsv_merge), strict=False)
    found = massmerge.load(bundle).embed(rows_of(inputs), task=tasks)
    expected = features_of(name, dense, inputs)
    assert relative_error(found, expected) < 1e-4


def algorithm_1(bundle, name, z, inputs, threshold):
    """Lines 2 to 13 of the paper, written out for one input: (task, label index, logit)."""
    tasks = ["a", "b", "c"]
    found = [torch.linalg.svd(_delta(bundle, task, "encoder.layer.1.intermediate.dense.weight")) for task in tasks]
    residuals = [(z - v[:8].mT @ v[:8] @ z).norm() for _, _, v in found]
    weights = torch.softmax(-torch.stack(residuals), 0)
    chosen = [task for task, w in zip(tasks, weights, strict=True) if w >= threshold]

    def plain_sum(parts):
        return sum(u.double() @ torch.diag(s.double()) @ v.double() for u, s, v in parts)

    best = None
    for task in chosen:
        with torch.inference_mode():
            values = dense_expert(bundle, name, chosen, task, plain_sum)(**inputs).logits[0]
        if best is None or float(values.max()) > best[2]:
            best = task, int(values.argmax()), float(values.max())
    return best


def _delta(bundle, task, tensor):
    expert = backbone_of(FAMILIES["bert"].expert.from_pretrained(bundle.parent / task), FAMILIES["bert"].base)
    base = FAMILIES["bert"].base.from_pretrained(bundle.parent / "base")
    return (expert.state_dict()[tensor] - base.state_dict()[tensor]).double()


def test_the_paper_s_options_give_algorithm_1_from_activation_to_answer(tmp_path):
    router = {"first_pass": "fixed", "site": "M1", "token": "cls", "standardize": False, "top_k": 3, "threshold": 0.3}
    tasks = {"a": 2, "b": 3, "c": 4}
    bundle = make_bundle(tmp_path, "bert", tasks, merge={"rank": 8}, router=router, answer={"merge": "plain"})
    model, rows = massmerge.load(bundle), bert_rows(8)
    sizes = set()
    for row, prediction, z in zip(rows, model.predict(rows), model.activations(rows)[0], strict=True):
        expected = algorithm_1(bundle, "bert", z.double(), {k: v[None] for k, v in row.items()}, 0.3)
        assert (prediction.task, prediction.label) == (expected[0], f"LABEL_{expected[1]}")
        assert abs(prediction.logit - expected[2]) < 1e-4
        sizes.add(len(prediction.routing.selected))
    assert len(sizes) > 1  # the threshold decides


# What an answer does not depend on


def assert_same(found, expected):
    assert [(p.task, p.label, p.routing.selected) for p in found] == [
        (p.task, p.label, p.routing.selected) for p in expected
    ]
    assert all(abs(a.score - b.score) < 1e-4 for a, b in zip(found, expected, strict=True))
    for a, b in zip(found, expected, strict=True):
        assert all(abs(a.routing.weights[task] - w) < 1e-3 for task, w in b.routing.weights.items())


@pytest.fixture(scope="module", params=CLASSIFIERS)
def mixed(request, root, tmp_path_factory):
    """A model that selects up to two tasks, and inputs of which texts differ in length."""
    folder = tmp_path_factory.mktemp("mixed") / request.param
    options = {"top_k": 2, "threshold": 0.3}
    model = massmerge.load(with_options(family_bundle(root, request.param), folder, router=options))
    rows = rows_of(FAMILIES[request.param].make_inputs(8))
    if FAMILIES[request.param].text:
        rows = [{k: v[: 3 + i % 5] for k, v in row.items()} for i, row in enumerate(rows)]
    return model, rows, [model.predict([row])[0] for row in rows]


def test_an_answer_does_not_depend_on_the_batch_size(mixed):
    model, rows, alone = mixed
    for size in (2, 3, 8):
        assert_same(model.predict(rows, batch_size=size), alone)


def test_an_answer_does_not_depend_on_the_order(mixed):
    model, rows, alone = mixed
    assert_same(model.predict(rows[::-1])[::-1], alone)


def test_an_answer_does_not_depend_on_the_others_in_the_batch(mixed):
    model, rows, alone = mixed
    assert_same(model.predict([rows[0], rows[5]]), [alone[0], alone[5]])
    assert_same(model.predict([rows[0]] * 4), [alone[0]] * 4)


def test_an_answer_does_not_depend_on_padding(mixed):
    model, rows, alone = mixed
    if "input_ids" not in rows[0]:
        longer = [{k: v.clone() for k, v in row.items()} for row in rows]  # images have none
    else:
        fill = model._runtime.base.config.pad_token_id
        longer = [
            {"input_ids": pad(r["input_ids"], (0, 4), value=fill), "attention_mask": pad(r["attention_mask"], (0, 4))}
            for r in rows
        ]
    assert_same(model.predict(longer), alone)


def test_the_inputs_of_these_tests_go_to_several_sets(mixed):
    assert len({tuple(sorted(p.routing.selected)) for p in mixed[2]}) > 1


def test_a_decoder_whose_expert_names_no_padding_token_answers_batches(tmp_path):
    recipe = write_family(tmp_path, "gpt2", {"a": 2, "b": 2}, rank=8)
    for folder in ("base", "a", "b"):
        path = tmp_path / folder / "config.json"
        path.write_text(path.read_text().replace('"pad_token_id": 0', '"pad_token_id": null'))
    massmerge.merge(recipe, tmp_path / "bundle")
    model = massmerge.load(tmp_path / "bundle")
    rows = [{"input_ids": torch.arange(5, 5 + n)} for n in (3, 6, 4)]
    assert_same(model.predict(rows), [model.predict([row])[0] for row in rows])


def test_experts_that_disagree_with_the_base_on_the_padding_token_are_answered_by_their_last_real_token(tmp_path):
    recipe = write_family(tmp_path, "gpt2", {"a": 2, "b": 3}, rank=32)
    for folder, number in (("base", "null"), ("a", "2"), ("b", "7")):
        path = tmp_path / folder / "config.json"
        path.write_text(path.read_text().replace('"pad_token_id": 0', f'"pad_token_id": {number}'))
    massmerge.merge(recipe, tmp_path / "bundle")
    model = massmerge.load(tmp_path / "bundle")
    rows = [{"input_ids": torch.arange(11, 11 + n)} for n in (3, 6, 4)]
    for task, labels in (("a", 2), ("b", 3)):
        expert = FAMILIES["gpt2"].expert.from_pretrained(tmp_path / task).eval()
        for row, prediction in zip(rows, model.predict(rows, task=task, top=9), strict=True):
            with torch.inference_mode():
                expected = expert(input_ids=row["input_ids"][None]).logits[0]
            assert float((logits(prediction, task, labels) - expected).abs().max()) < 1e-4


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
            v = torch.linalg.svd(_delta(family_bundle(root, "bert"), task, name))[2][:8]
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
            v = torch.linalg.svd(_delta(family_bundle(root, "bert"), task, name))[2][:8].float()
            shares = [float((z - v.mT @ (v @ z)).norm() / z.norm()) for z in found[-1]]
            assert abs(routing.residuals[task] - sum(shares) / len(shares)) < 1e-4


def test_text_models_route_by_the_mean_and_image_models_by_class_token_and_mean(root, bert):
    assert bert.voters == ["O0.mean", "M0.mean", "O1.mean", "M1.mean"]
    assert massmerge.load(family_bundle(root, "vit")).voters == ["O0.cls", "O0.mean"]


def test_route_batch_decides_once_for_all(one_voter):
    rows = bert_rows(9)
    assert len({p.task for p in one_voter.predict(rows)}) > 1
    found = one_voter.predict(rows, route="batch")
    assert len({p.task for p in found}) == 1
    assert len({tuple(p.routing.selected) for p in found}) == 1


def test_route_batch_runs_the_first_pass_on_a_few_inputs(bert, monkeypatch):
    seen = []
    first = bert._runtime.first_pass
    monkeypatch.setattr(bert._runtime, "first_pass", lambda b: (seen.append(len(b["input_ids"])), first(b))[1])
    bert.predict(bert_rows(20), route="batch", batch_size=20)
    assert seen[0] < 20


def test_route_batch_on_inputs_that_are_alike_answers_as_each_by_itself(bert):
    row = bert_rows(1)
    assert_same(bert.predict(row * 6, route="batch"), bert.predict(row * 6))


def test_a_route_that_does_not_exist_is_refused(bert):
    with pytest.raises(InputError, match="route is 'input' or 'batch', not 'row'"):
        bert.predict(bert_rows(1), route="row")


# Tasks that are given


def test_a_given_task_skips_the_first_pass(bert, monkeypatch):
    monkeypatch.setattr(bert._runtime, "first_pass", lambda batch: pytest.fail("the first pass ran"))
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
        with pytest.raises(InputError, match=r"no task 'z'\. There are a, b, c\."):
            call(bert_rows(1), task=["a", "z"])


def test_an_empty_list_of_tasks_is_refused(bert):
    with pytest.raises(InputError, match=r"an empty list of tasks\. There are a, b, c\."):
        bert.predict(bert_rows(1), task=[])


# Few tasks, equal tasks, tasks that change nothing


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
        v = torch.linalg.svd(_delta(family_bundle(root, "bert"), routing.selected[0], name))[2][:8]
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
    v = torch.linalg.svd(_delta(family_bundle(root, "bert"), found.selected[0], name))[2][:8]
    z = one_voter.activations(rows)[0].double()
    shares = (z @ v.mT).square().sum(1) / z.square().sum(1)
    assert abs(found.lift - float(shares.mean()) / (8 / 32)) < 1e-4


def test_a_batch_that_is_routed_as_one_can_be_unknown(bert):
    assert [p.task for p in bert.predict(bert_rows(3), route="batch", unknown={"lift": 1e6})] == [None] * 3


def test_a_wrong_limit_is_refused_by_name(bert):
    with pytest.raises(InputError, match=r"unknown: lfit: .*It takes lift"):
        bert.predict(bert_rows(1), unknown={"lfit": 2.0})


# The best label over several heads


def two_heads(score, weights=None, weight=1.0, top=9):
    values = {"sure": torch.tensor([4.0, 0.0]), "loud": torch.tensor([5.0, 4.9, 4.8])}
    labels = {"sure": ("s0", "s1"), "loud": ("l0", "l1", "l2")}
    options = AnswerOptions(score=score, weight=weight)
    return rank_answers(values, labels, weights or {"sure": 0.5, "loud": 0.5}, options, top)


def test_by_logit_the_highest_logit_over_all_heads_wins():
    assert [a.label for a in two_heads("logit")] == ["l0", "l1", "l2", "s0", "s1"]


def test_by_probability_the_head_that_is_surest_wins():
    assert two_heads("probability")[0].label == "s0"


def test_by_logit_and_weight_the_router_has_a_say():
    weights = {"sure": 0.9, "loud": 0.1}
    assert two_heads("logit_and_weight", weights)[0].label == "s0"
    assert two_heads("logit_and_weight", weights, weight=0.0)[0].label == "l0"
    by = {a.label: a.logit + np.log(weights[a.task]) for a in two_heads("logit_and_weight", weights)}
    assert list(by.values()) == sorted(by.values(), reverse=True)


def test_the_score_of_an_answer_is_its_probability_within_its_head():
    found = {a.label: a.score for a in two_heads("logit")}
    assert abs(sum(found[label] for label in ("l0", "l1", "l2")) - 1) < 1e-6
    assert abs(found["s0"] - float(torch.tensor([4.0, 0.0]).softmax(0)[0])) < 1e-6


def test_no_more_answers_are_given_than_asked_for():
    assert len(two_heads("logit", top=2)) == 2


def test_the_recipe_says_how_heads_are_compared(root, tmp_path):
    rows, chosen = bert_rows(6), []
    for score in ("logit", "probability"):
        folder = tmp_path / score
        router = {"top_k": 3, "threshold": 0.0}
        with_options(family_bundle(root, "bert"), folder, router=router, answer={"score": score})
        chosen.append(massmerge.load(folder).predict(rows, top=99))
    for by_logit, by_probability in zip(*chosen, strict=True):
        assert by_logit.logit == max(logits_of(by_logit).values())
        others = [a.score for a in by_probability.alternatives]
        assert by_probability.score >= max(others)


def test_alternatives_come_from_all_heads_of_the_set(root, tmp_path):
    options = {"top_k": 3, "threshold": 0.0}
    model = massmerge.load(with_options(family_bundle(root, "bert"), tmp_path / "bundle", router=options))
    found = model.predict(bert_rows(1), top=99)[0]
    assert Counter(task for task, _ in logits_of(found)) == {"a": 2, "b": 3, "c": 4}


def test_top_is_the_number_of_answers_with_the_best_one(bert):
    assert [len(bert.predict(bert_rows(1), task="c", top=n)[0].alternatives) for n in (1, 2, 3)] == [0, 1, 2]


@pytest.mark.parametrize("wrong", [{"top": 0}, {"batch_size": 0}])
def test_numbers_below_1_are_refused(bert, wrong):
    with pytest.raises(InputError, match="at least 1"):
        bert.predict(bert_rows(1), **wrong)


# Inputs of every kind, streamed


def test_one_text_is_one_input(text):
    assert len(text.predict("win a prize")) == 1


def test_texts_and_pairs_of_texts_may_stand_side_by_side(text):
    found = text.predict(["a good film", ("a good film", "a bad song"), "win"])
    alone = [text.predict([item])[0] for item in ["a good film", ("a good film", "a bad song"), "win"]]
    assert_same(found, alone)
    assert found[0].routing.residuals != found[1].routing.residuals


def test_any_iterable_of_texts_is_answered(text):
    expected = text.predict(TEXTS)
    for inputs in (tuple(TEXTS), iter(TEXTS), (t for t in TEXTS), np.array(TEXTS), dict.fromkeys(TEXTS).keys()):
        assert_same(text.predict(inputs), expected)


def test_what_a_tokenizer_gives_is_a_batch_of_ready_inputs(root, text):
    tokenizer = AutoTokenizer.from_pretrained(text_bundle(root) / "processor")
    ready = tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert_same(text.predict(ready), text.predict(TEXTS))
    assert_same(text.predict(dict(ready)), text.predict(TEXTS))


def test_ready_tensors_may_stand_beside_texts(text):
    ids = torch.tensor([2, 5, 6, 3])
    found = text.predict(["a good film", {"input_ids": ids}])
    assert_same(found, [text.predict("a good film")[0], text.predict({"input_ids": ids})[0]])


def test_an_empty_list_has_no_answers(text):
    assert text.predict([]) == []
    assert text.route([]) == []
    assert text.embed([]).numel() == 0
    assert text.activations([]) == []


def test_images_can_be_given_as_path_text_of_a_path_picture_array_or_tensor(root, tmp_path):
    from PIL import Image

    model = massmerge.load(image_bundle(root))
    array = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    picture = Image.fromarray(array)
    picture.save(tmp_path / "x.png")
    pixels = model._runtime.reader.processor(images=picture, return_tensors="pt")["pixel_values"]
    expected = model.predict(picture)
    for given in (tmp_path / "x.png", str(tmp_path / "x.png"), [picture], array, array[None], pixels, pixels[0]):
        assert_same(model.predict(given), expected)
    assert_same(model.predict({"pixel_values": pixels}), expected)


def test_a_stream_reads_no_further_than_the_batch_it_answers(text):
    taken = []

    def endless():
        for i in itertools.count():
            taken.append(i)
            yield TEXTS[i % len(TEXTS)]

    stream = text.stream(endless(), batch_size=4)
    for expected in (4, 4, 4, 4, 8):
        next(stream)
        assert len(taken) == expected


def test_an_input_that_cannot_be_read_has_its_error_in_its_row(text):
    found = text.predict(["win", "", "a good film"], on_error="row")
    assert [p.error for p in found] == [None, "empty text.", None]
    assert found[1].task is None
    assert_same([found[0], found[2]], text.predict(["win", "a good film"]))


def test_an_input_that_cannot_be_read_stops_everything_by_default(text):
    with pytest.raises(InputError, match="empty text"):
        text.predict(["win", ""])


def test_a_batch_of_errors_alone_is_answered_with_them(text):
    assert [p.error for p in text.predict(["", " "], on_error="row")] == ["empty text.", "empty text."]


# What else a model tells


def test_timings_say_where_the_time_of_the_batch_went(text):
    found = text.predict(TEXTS)[0].timings
    assert found.keys() == {"first pass", "routing", "second pass", "heads", "inputs"}
    assert found["inputs"] == len(TEXTS)
    assert text.predict(TEXTS, task="spam")[0].timings.keys() == {"second pass", "heads", "inputs"}


def test_a_model_knows_its_tasks_labels_and_sites(text):
    assert text.tasks == ["spam", "topic", "mood"]
    assert text.labels["topic"] == ("politics", "sports", "science", "arts")
    assert text.takes_images is False
    assert {"A0", "M3"} <= {site.name for site in text.sites}


def test_labels_are_those_of_the_task_that_answers(text):
    for prediction in text.predict(TEXTS):
        assert prediction.label in text.labels[prediction.task]


def test_a_prediction_can_be_had_as_plain_data(text):
    data = text.predict("win")[0].to_dict()
    assert data["routing"]["selected"] == [data["task"]]
    assert isinstance(data["alternatives"][0], dict)


def test_features_have_a_row_for_each_input_in_its_order(bert):
    rows = bert_rows(7)
    together = bert.embed(rows, batch_size=3)
    assert together.shape == (7, 32)
    assert relative_error(bert.embed([rows[5]])[0], together[5]) < 1e-4


# Bundles that cannot be loaded


def test_a_folder_that_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"not a bundle \(no mass\.json in it\).*mass merge"):
        massmerge.load(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such folder"):
        massmerge.load(tmp_path / "nowhere")


def test_a_damaged_bundle_is_refused_with_the_file_and_what_to_do(root, tmp_path):
    bundle = with_options(family_bundle(root, "bert"), tmp_path / "bundle")
    path = bundle / "tasks" / "b" / "factors.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"(?s)damaged:.*tasks/b/factors\.safetensors.*copy the bundle again"):
        massmerge.load(bundle)


def changed_byte(root, folder):
    """A bundle with one byte changed in a file whose size and header are right."""
    bundle = with_options(family_bundle(root, "bert"), folder)
    path = bundle / "tasks" / "b" / "factors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return bundle


def test_changed_bytes_are_found_in_the_background_and_refused_from_then_on(root, tmp_path):
    model = massmerge.load(changed_byte(root, tmp_path / "bundle"))
    with pytest.raises(InputError, match="SHA-256 differs"):
        model._runtime.watch.refuse_damage(wait=True)
    with pytest.raises(InputError, match="SHA-256 differs"):
        model.embed(rows_of(FAMILIES["bert"].make_inputs(1)))


def test_changed_bytes_are_refused_at_once_if_asked_for_and_never_if_not(root, tmp_path):
    bundle = changed_byte(root, tmp_path / "bundle")
    with pytest.raises(InputError, match="SHA-256 differs"):
        massmerge.load(bundle, check=True)
    assert massmerge.load(bundle, check=False)._runtime.watch is None


def test_a_site_that_does_not_exist_is_refused_when_loading(root, tmp_path):
    bundle = with_options(family_bundle(root, "bert"), tmp_path / "bundle", router={"site": "M7"})
    with pytest.raises(InputError, match=r"no site 'M7'\. There are A0, O0, M0, D0, A1, O1, M1, D1"):
        massmerge.load(bundle)


def test_a_cache_of_no_size_is_refused(root):
    with pytest.raises(InputError, match="'lots' is no size"):
        massmerge.load(family_bundle(root, "bert"), cache="lots")
