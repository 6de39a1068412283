"""Layers that heads read at the first token only: found by what a pass shows, and computed there alone."""

import pytest
import torch

import massmerge
from answers import assert_same_answers, vit_images
from massmerge.model.second_pass.first_token import first_token_layers
from massmerge.model.second_pass.install import PROBE_BATCH, observe
from massmerge.routing.sites import probe_inputs
from models import FAMILIES, family_bundle, rows_of

# What the class's own head reads: the first token, all of them (dinov2, clip), or the last one (gpt2, llama).
EXPECTED = {
    "bert": ["attention.output.dense", "attention.self.query", "intermediate.dense", "output.dense"],
    "roberta": ["attention.output.dense", "attention.self.query", "intermediate.dense", "output.dense"],
    "distilbert": ["attention.out_lin", "attention.q_lin", "ffn.lin1", "ffn.lin2"],
    "modernbert": ["attn.Wo", "mlp.Wi", "mlp.Wo"],  # its queries are one layer with keys and values
    "vit": ["attention.o_proj", "attention.q_proj", "mlp.fc1", "mlp.fc2"],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_the_last_block_are_found_where_the_head_reads_the_first_token(root, name):
    sets = massmerge.load(family_bundle(root, name)).sets
    found = sorted(sets.second_pass.look_for_first_only())
    assert [path.partition(".1.")[2] for path in found] == EXPECTED.get(name, [])


def found_for(root, *heads):
    base = massmerge.load(family_bundle(root, "vit")).core.base
    called = observe(base, probe_inputs(base, PROBE_BATCH)).called
    inputs = probe_inputs(base, 1)
    return first_token_layers(base, called, heads, inputs, inputs)


def first(output, _):
    return output.last_hidden_state[:, 0]


def second(output, _):
    return output.last_hidden_state[:, 1]


def mean(output, _):
    return output.last_hidden_state.mean(1)


def nothing(output, _):
    return torch.zeros(len(output.last_hidden_state), 2)


@pytest.mark.parametrize(
    "heads",
    [(second,), (mean,), (first, mean), (nothing,), ()],
    ids=lambda heads: " and ".join(head.__name__ for head in heads) or "no head",
)
def test_nothing_is_left_out_where_any_head_reads_more_or_other_than_the_first_token(root, heads):
    assert found_for(root, first)
    assert found_for(root, *heads) == set()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_heads_give_the_same_logits_and_other_tokens_are_not_computed(root, name):
    model = massmerge.load(family_bundle(root, name))
    inputs = vit_images(model) if name == "vit" else rows_of(FAMILIES[name].make_inputs(12, 0))
    batch = model.core.batch([model.core.reader.row(item) for item in inputs])
    routings = model.route(inputs)
    assert model.sets.second_pass.look_for_first_only()
    whole, part = (model.sets.forward(batch, routings, for_heads=h) for h in (False, True))
    assert whole.order == part.order
    answers = [model._heads(passed, routings, 3) for passed in (whole, part)]
    full, short = whole.output, part.output
    for one, other in zip(*answers, strict=True):
        assert (one.task, one.label) == (other.task, other.label)
        assert one.logit == pytest.approx(other.logit, abs=1e-5)
    assert torch.allclose(full.last_hidden_state[:, 0], short.last_hidden_state[:, 0], atol=1e-5)
    assert not torch.allclose(full.last_hidden_state[:, 1:], short.last_hidden_state[:, 1:], atol=1e-2)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_embeddings_are_of_all_tokens(root, name):
    model = massmerge.load(family_bundle(root, name))
    inputs = vit_images(model) if name == "vit" else rows_of(FAMILIES[name].make_inputs(6, 0))
    before = model.embed(inputs)
    assert model.sets.second_pass.look_for_first_only()
    assert torch.allclose(model.embed(inputs), before, atol=1e-6)


def test_what_heads_read_is_looked_for_when_a_few_batches_have_been_answered(root):
    model = massmerge.load(family_bundle(root, "vit"))
    images = vit_images(model)
    answers = []
    for count in range(1, 5):
        answers.append(model.predict(images))
        assert any(layer.first_only for layer in model.sets.second_pass.layers().values()) == (count > 2)
    for later in answers[1:]:
        assert_same_answers(later, answers[0])
