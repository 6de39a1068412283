"""Answers are those of the original experts and of dense merges, whatever else is in the batch."""

import pytest
import torch
from torch.nn.functional import pad

import massmerge
from answers import assert_same_answers, bert_delta, bert_rows
from models import (
    FAMILIES,
    dense_changes,
    dense_expert,
    family_bundle,
    logits_of,
    make_bundle,
    rows_of,
    with_options,
    write_family,
)
from naive import relative_error, tsv_merge

CLASSIFIERS = [name for name in FAMILIES if name not in ("t5", "clip")]


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
    found = [torch.linalg.svd(bert_delta(bundle, task, "encoder.layer.1.intermediate.dense.weight")) for task in tasks]
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
        assert_same_answers(model.predict(rows, batch_size=size), alone)


def test_an_answer_does_not_depend_on_the_order(mixed):
    model, rows, alone = mixed
    assert_same_answers(model.predict(rows[::-1])[::-1], alone)


def test_an_answer_does_not_depend_on_the_others_in_the_batch(mixed):
    model, rows, alone = mixed
    assert_same_answers(model.predict([rows[0], rows[5]]), [alone[0], alone[5]])
    assert_same_answers(model.predict([rows[0]] * 4), [alone[0]] * 4)


def test_an_answer_does_not_depend_on_padding(mixed):
    model, rows, alone = mixed
    if "input_ids" not in rows[0]:
        longer = [{k: v.clone() for k, v in row.items()} for row in rows]  # images have none
    else:
        fill = model.core.base.config.pad_token_id
        longer = [
            {"input_ids": pad(r["input_ids"], (0, 4), value=fill), "attention_mask": pad(r["attention_mask"], (0, 4))}
            for r in rows
        ]
    assert_same_answers(model.predict(longer), alone)


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
    assert_same_answers(model.predict(rows), [model.predict([row])[0] for row in rows])


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
