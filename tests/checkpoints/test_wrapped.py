"""State dicts of classes that others wrote around a backbone."""

import pytest
import torch
import yaml

from massmerge.errors import InputError
from massmerge.merging.open_recipe import make_plan
from models import assert_same, open_pair, rewrite, state_of, weights_of
from pairs import BERT, write_bert


def save(folder, state, name="lone.pt"):
    torch.save({key: tensor.detach().clone() for key, tensor in state.items()}, folder / name)
    return name


def prefixed(state, prefix):
    return {prefix + name: tensor for name, tensor in state.items()}


HEADS = {"one.weight": torch.zeros(2, 32), "one.bias": torch.zeros(2), "two.weight": torch.zeros(3, 32)}


@pytest.mark.parametrize("prefix", ["transformer.", "net.encoder.", "encoder."])
def test_a_prefix_before_the_backbone_s_names_is_found(tmp_path, prefix):
    _, expert = write_bert(tmp_path)
    name = save(tmp_path, prefixed(expert.bert.state_dict(), prefix) | HEADS)
    base, found = open_pair(tmp_path, name)
    assert_same(weights_of(base, found), state_of(expert, BERT.base))
    assert list(found.beside) == list(HEADS)


def test_a_task_s_model_inside_a_wrapper_keeps_its_head(tmp_path):
    _, expert = write_bert(tmp_path)
    name = save(tmp_path, prefixed(expert.state_dict(), "model.") | HEADS)
    _, found = open_pair(tmp_path, name)
    assert found.head.read("classifier.weight").equal(expert.classifier.weight)


def recipe(folder, expert, **task):
    named = {"base": "base", "tasks": [{"name": "t", "expert": expert, **task}]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(named))
    return make_plan(folder / "recipe.yaml")


def test_layers_that_nobody_asked_for_are_left_out_with_the_line_that_asks_for_one(tmp_path):
    _, expert = write_bert(tmp_path)
    plan = recipe(tmp_path, save(tmp_path, prefixed(expert.bert.state_dict(), "transformer.") | HEADS))
    (warning,) = [p.message for p in plan.problems if "left out" in p.message]
    assert all(f"{name} " in warning for name in HEADS)
    assert "`head: {weights: lone.pt, layers: [one], labels: …}`" in warning


def test_the_layer_that_is_the_head_is_not_among_those_left_out(tmp_path):
    _, expert = write_bert(tmp_path)
    name = save(tmp_path, prefixed(expert.bert.state_dict(), "transformer.") | HEADS)
    plan = recipe(tmp_path, name, head={"weights": name, "layers": "one", "labels": ["a", "b"], "features": "cls"})
    assert not plan.errors
    (warning,) = [p.message for p in plan.problems]
    assert "two.weight" in warning and "one." not in warning


def test_a_second_head_beside_the_class_s_own_is_left_out(tmp_path):
    write_bert(tmp_path)
    rewrite(tmp_path / "expert", lambda s: s | {"second.weight": torch.zeros(4, 32)})
    _, found = open_pair(tmp_path)
    assert list(found.beside) == ["second.weight"] and found.head is not None


def test_a_backbone_without_its_pooler_has_the_base_s(tmp_path):
    base, expert = write_bert(tmp_path)
    name = save(tmp_path, {n: t for n, t in expert.bert.state_dict().items() if not n.startswith("pooler")})
    opened, found = open_pair(tmp_path, name)
    assert weights_of(opened, found)["pooler.dense.weight"].equal(base.pooler.dense.weight)
    assert any("the base's are used" in text and "pooler.dense.weight" in text for text in found.warnings)


@pytest.mark.parametrize("lost", ["embeddings.word_embeddings.weight", "encoder.layer.1.output.dense.bias"])
def test_a_backbone_without_anything_else_is_refused(tmp_path, lost):
    _, expert = write_bert(tmp_path)
    name = save(tmp_path, {n: t for n, t in expert.bert.state_dict().items() if n != lost})
    with pytest.raises(InputError, match=f"the expert lacks:\\s+{lost}"):
        open_pair(tmp_path, name)


def test_weights_under_names_that_the_base_does_not_know_are_refused_in_few_lines(tmp_path):
    _, expert = write_bert(tmp_path)
    renamed = {name.replace(".", "/"): tensor for name, tensor in expert.bert.state_dict().items()}
    with pytest.raises(InputError) as caught:
        open_pair(tmp_path, save(tmp_path, renamed))
    message = str(caught.value)
    assert "none of its 39 tensors has a name that a BertModel knows" in message
    assert len(message.splitlines()) < 16
