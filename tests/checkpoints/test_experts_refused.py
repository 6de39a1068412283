"""What is no version of the base, and how that is told."""

import re

import pytest
import torch

from massmerge.errors import InputError
from massmerge.merging.open_recipe import make_plan
from models import FAMILIES, open_pair, rewrite
from pairs import BERT, write_bert, write_pair


def refusal(folder, expert="expert"):
    with pytest.raises(InputError) as caught:
        open_pair(folder, expert)
    return str(caught.value)


def test_an_expert_of_another_architecture_is_refused_with_both_classes(tmp_path):
    vit = FAMILIES["vit"]
    write_pair(tmp_path, BERT.make_base(), vit.make_expert(vit.make_base(), 0))
    message = refusal(tmp_path)
    assert "is a ViTForImageClassification" in message
    assert "the base is a BertModel" in message
    assert "must be fine-tuned from the recipe's base" in message


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"num_hidden_layers": 3}, "the expert has these, the base does not"),
        ({"num_hidden_layers": 1}, "the base has these, the expert does not"),
    ],
    ids=["more", "fewer"],
)
def test_an_expert_with_another_number_of_layers_is_refused_with_every_tensor(tmp_path, changes, title):
    expert = BERT.expert(BERT.make_config(**changes))
    write_pair(tmp_path, BERT.make_base(), expert)
    message = refusal(tmp_path)
    layer = max(changes["num_hidden_layers"], 2) - 1
    assert title in message
    assert len(set(re.findall(rf"encoder\.layer\.{layer}\.\S+", message))) == 16


def test_an_expert_of_another_size_is_refused_with_both_shapes_of_every_tensor(tmp_path):
    base, expert = BERT.make_base(), BERT.expert(BERT.make_config(hidden_size=48))
    write_pair(tmp_path, base, expert)
    message = refusal(tmp_path)
    theirs = expert.bert.state_dict()
    different = {n: (tuple(theirs[n].shape), tuple(t.shape)) for n, t in base.state_dict().items()
                 if t.shape != theirs[n].shape}  # fmt: skip
    assert len(different) > 30
    for name, (a, b) in different.items():
        assert f"{name}: {a} against {b}" in message


def test_an_expert_whose_weights_are_not_of_the_size_in_its_configuration_is_refused(tmp_path):
    write_bert(tmp_path)
    rewrite(tmp_path / "expert", lambda s: s | {"bert.pooler.dense.bias": torch.zeros(5)})
    assert "pooler.dense.bias: (5,) against (32,)" in refusal(tmp_path)


def test_a_vocabulary_of_another_size_is_refused_with_the_remedy(tmp_path):
    write_pair(tmp_path, BERT.make_base(), BERT.expert(BERT.make_config(vocab_size=64)))
    message = refusal(tmp_path)
    assert "embeddings.word_embeddings.weight: (64, 32) against (60, 32)" in message
    assert "resize the expert's embeddings" in message


@pytest.mark.parametrize("name", ["bert.encoder.layer.1.output.dense.bias", "classifier.weight"])
def test_an_expert_lacking_a_tensor_is_refused_with_its_name(tmp_path, name):
    write_bert(tmp_path)
    rewrite(tmp_path / "expert", lambda s: {k: v for k, v in s.items() if k != name})
    assert re.search(rf"the expert lacks:\s+{re.escape(name)}", refusal(tmp_path))


def test_an_expert_with_a_tensor_too_many_is_refused_with_its_name(tmp_path):
    write_bert(tmp_path)
    rewrite(tmp_path / "expert", lambda s: s | {"bert.encoder.gate.weight": torch.zeros(2)})
    message = refusal(tmp_path)
    assert "its class BertForSequenceClassification does not" in message
    assert "bert.encoder.gate.weight" in message


def test_every_difference_stands_in_one_message(tmp_path):
    write_bert(tmp_path)
    rewrite(
        tmp_path / "expert",
        lambda s: {k: v for k, v in s.items() if k != "bert.pooler.dense.weight"} | {"x.y": torch.zeros(1),
                   "bert.pooler.dense.bias": torch.zeros(5)},
    )  # fmt: skip
    message = refusal(tmp_path)
    assert all(name in message for name in ("pooler.dense.weight", "x.y", "pooler.dense.bias: (5,) against (32,)"))


def test_a_lone_state_dict_of_another_model_is_refused(tmp_path):
    write_bert(tmp_path)
    torch.save({"conv.weight": torch.zeros(3, 3)}, tmp_path / "lone.pt")
    message = refusal(tmp_path, "lone.pt")
    assert "not a fine-tuned version of the base" in message
    assert "conv.weight" in message


def test_a_head_that_is_not_of_the_size_in_its_configuration_is_refused(tmp_path):
    write_bert(tmp_path, labels=3)
    rewrite(tmp_path / "expert", lambda s: s | {"classifier.weight": torch.zeros(4, 32)})
    message = refusal(tmp_path)
    assert "classifier.weight: (4, 32) against (3, 32)" in message
    assert "Correct id2label" in message


def test_a_configuration_that_computes_something_else_is_told(tmp_path):
    base = BERT.make_base()
    write_pair(tmp_path, base, BERT.expert(BERT.make_config(hidden_act="relu")))
    assert any("hidden_act: 'relu' against the base's 'gelu'" in w for w in open_pair(tmp_path)[1].warnings)


def test_dropout_and_labels_may_differ_without_a_word(tmp_path):
    write_pair(tmp_path, BERT.make_base(), BERT.expert(BERT.make_config(9, hidden_dropout_prob=0.4)))
    assert open_pair(tmp_path)[1].warnings == []


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "cannot read this configuration"), ('{"model_type": "no_such_model"}', "cannot read this configuration"),
     ('{"model_type": "bert", "hidden_size": "x"}', "Field 'hidden_size' expected int, got str"),
     ('{"model_type": "bert", "hidden_size": 33}', "cannot build bert"),
     ('{"model_type": "bert", "hidden_size": -48}', "cannot build bert"),
     ('{"model_type": "bert", "architectures": ["BertForTelepathy"]}', "has no model class BertForTelepathy")],
    ids=["no json", "unknown type", "no number", "impossible", "negative", "unknown class"],
)  # fmt: skip
def test_a_configuration_that_cannot_be_used_is_refused(tmp_path, text, words):
    write_bert(tmp_path)
    (tmp_path / "expert" / "config.json").write_text(text)
    assert words in refusal(tmp_path)


def test_a_base_whose_weights_do_not_fit_its_configuration_is_refused(tmp_path):
    write_bert(tmp_path)
    rewrite(tmp_path / "base", lambda s: s | {"pooler.dense.bias": torch.zeros(5)})
    assert "base: weights and config.json do not agree" in refusal(tmp_path)


def test_a_base_of_other_weights_is_refused(tmp_path):
    write_bert(tmp_path)
    rewrite(tmp_path / "base", lambda _: {"x": torch.zeros(5)})
    assert "base: its weights are not those of a BertModel" in refusal(tmp_path)


def test_a_base_that_lacks_a_tensor_of_a_block_is_refused(tmp_path):
    write_bert(tmp_path)
    rewrite(tmp_path / "base", lambda s: {k: v for k, v in s.items() if "layer.1.output.dense.weight" not in k})
    assert "encoder.layer.1.output.dense.weight" in refusal(tmp_path)


def test_problems_name_the_task_and_its_expert(tmp_path):
    write_bert(tmp_path)
    rewrite(tmp_path / "expert", lambda s: {k: v for k, v in s.items() if "pooler" not in k})
    (tmp_path / "recipe.yaml").write_text(
        "base: base\ntasks: [{name: spam, expert: expert}, {name: ham, expert: nowhere}]\n"
    )
    spam, ham = sorted(str(p) for p in make_plan(tmp_path / "recipe.yaml").errors)[::-1]
    assert spam.startswith("task spam (expert): not a fine-tuned version of the base")
    assert ham.startswith("task ham: nowhere: no such file or folder")


class Harmful:
    """Unpickling this would stop the tests."""

    def __reduce__(self):
        return exit, ()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


DAMAGE = {
    "truncated": (truncate, "damaged"),
    "garbage": (lambda path: path.write_bytes(b"\x10" + bytes(7) + b"not a header at all"), "not a safetensors file"),
    "longer than the file": (lambda path: path.write_bytes(b"\xff" * 8), "its header would be"),
    "missing": (lambda path: path.unlink(), "contains no weights"),
    "code": (
        lambda path: (path.unlink(), torch.save(Harmful(), path.with_name("pytorch_model.bin"))),
        "more than tensors",
    ),
    "no state dict": (
        lambda path: (path.unlink(), torch.save([1], path.with_name("pytorch_model.bin"))),
        "state_dict()",
    ),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_weights_are_a_problem_that_names_task_and_file(tmp_path, damage, words):
    write_bert(tmp_path)
    damage(tmp_path / "expert" / "model.safetensors")
    (tmp_path / "recipe.yaml").write_text("base: base\ntasks: [{name: spam, expert: expert}]\n")
    (problem,) = make_plan(tmp_path / "recipe.yaml").errors
    assert problem.where == "task spam (expert)"
    assert str(tmp_path / "expert") in problem.message
    assert words in problem.message
