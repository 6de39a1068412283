"""Static merges of models that write: the output layer is merged too, and the folder is a language model that writes."""

import json

import pytest
import torch
import transformers as tf

import massmerge
from massmerge import InputError, StaticModel
from models import write_recipe
from writers import CLASSES, KINDS, NEW, dense_tokens, make_model, make_writers, naive_sum, prompts, shifted

OPENERS = {"t5": tf.AutoModelForSeq2SeqLM, "gpt2": tf.AutoModelForCausalLM, "llama": tf.AutoModelForCausalLM}


def opened(kind: str, folder) -> tf.PreTrainedModel:
    """A checkpoint as transformers opens it, if no tensor is missing and none is left over."""
    model, report = OPENERS[kind.partition(" ")[0]].from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()


def naive_average(states) -> dict[str, torch.Tensor]:
    return {n: torch.stack([states[t][n] for t in "ab"]).mean(0) for n in states["base"]}


@pytest.mark.parametrize("kind", [*KINDS, "llama"])
@pytest.mark.parametrize("method", ["average", "task_arithmetic"])
def test_a_static_merge_of_writers_is_the_naive_merge_output_layer_included(tmp_path, kind, method):
    states = make_writers(tmp_path, kind)
    options = {"method": method, **({"scale": 0.3} if method == "task_arithmetic" else {})}
    massmerge.merge(write_recipe(tmp_path, ["a", "b"], **options), tmp_path / "out")
    model = opened(kind, tmp_path / "out")
    expected = make_model(kind)
    assert type(model) is type(expected)
    expected.load_state_dict(naive_average(states) if method == "average" else naive_sum(states))
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=1e-5, rtol=1e-5)
    assert [dense_tokens(model, row) for row in prompts(kind)] == [dense_tokens(expected, row) for row in prompts(kind)]


@pytest.mark.parametrize("kind", ["t5 untied", "llama untied"])
def test_a_method_that_keeps_the_tasks_writes_a_language_model_for_each(tmp_path, kind):
    make_writers(tmp_path, kind)
    massmerge.merge(write_recipe(tmp_path, ["a", "b"], method="emr"), tmp_path / "out")
    merged = opened(kind, tmp_path / "out" / "a")
    own = CLASSES[kind.partition(" ")[0]].from_pretrained(tmp_path / "a").lm_head.weight
    base = CLASSES[kind.partition(" ")[0]].from_pretrained(tmp_path / "base").lm_head.weight
    assert (merged.lm_head.weight - own).norm() < (base - own).norm()


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_an_expert_with_an_output_layer_of_its_own_unties_the_merge(tmp_path, kind):
    make_writers(tmp_path, kind)
    own = make_model(f"{kind} untied")
    own.load_state_dict(make_model(kind).state_dict())
    shifted(own, 30, 0.1).save_pretrained(tmp_path / "a")
    massmerge.merge(write_recipe(tmp_path, ["a", "b"], method="average"), tmp_path / "out")
    model = opened(kind, tmp_path / "out")
    tied = CLASSES[kind].from_pretrained(tmp_path / "b")
    for layer in ("get_output_embeddings", "get_input_embeddings"):
        mean = (getattr(own, layer)().weight + getattr(tied, layer)().weight) / 2
        torch.testing.assert_close(getattr(model, layer)().weight, mean, atol=1e-5, rtol=1e-5)


def test_experts_without_an_output_layer_write_with_the_bases(tmp_path):
    """As those that were saved by `AutoModel`."""
    make_writers(tmp_path, "llama untied")
    for task in "ab":
        tf.LlamaModel.from_pretrained(tmp_path / task).save_pretrained(tmp_path / f"{task}-bare")
    recipe = write_recipe(tmp_path, ["a-bare", "b-bare"], method="average")
    massmerge.merge(recipe, tmp_path / "out")
    base = tf.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    assert opened("llama", tmp_path / "out").lm_head.weight.equal(base.lm_head.weight)


def test_where_nothing_has_an_output_layer_the_merge_is_a_backbone(tmp_path):
    make_writers(tmp_path, "llama untied")
    for name in ("base", "a", "b"):
        tf.LlamaModel.from_pretrained(tmp_path / name).save_pretrained(tmp_path / f"{name}-bare")
    recipe = write_recipe(tmp_path, ["a-bare", "b-bare"], base="base-bare", method="average")
    massmerge.merge(recipe, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaModel"]


def test_classifiers_of_a_base_that_generates_are_merged_without_its_output_layer(tmp_path):
    base = shifted(make_model("llama untied"), 1, 0.3)
    base.save_pretrained(tmp_path / "base")
    for task in "ab":
        expert = tf.LlamaForSequenceClassification(base.config)
        expert.model.load_state_dict(base.model.state_dict())
        expert.save_pretrained(tmp_path / task)
    massmerge.merge(write_recipe(tmp_path, ["a", "b"], method="average"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaModel"]
    assert (tmp_path / "out" / "heads" / "a" / "head" / "model.safetensors").is_file()


def test_the_card_opens_the_merge_with_the_class_that_writes(tmp_path):
    make_writers(tmp_path, "t5")
    massmerge.merge(write_recipe(tmp_path, ["a", "b"], method="average"), tmp_path / "out")
    assert 'AutoModelForSeq2SeqLM.from_pretrained(".")' in (tmp_path / "out" / "README.md").read_text()


# Answers of a loaded merge


@pytest.mark.parametrize("kind", ["t5 untied", "llama untied"])
def test_a_loaded_merge_writes_what_transformers_writes_with_it(tmp_path, kind):
    make_writers(tmp_path, kind)
    massmerge.merge(write_recipe(tmp_path, ["a", "b"], method="ties"), tmp_path / "out")
    found = StaticModel(tmp_path / "out").generate(prompts(kind), batch_size=2, max_new_tokens=NEW)
    model = opened(kind, tmp_path / "out")
    assert [one.tokens for one in found] == [dense_tokens(model, row) for row in prompts(kind)]
    assert {one.task for one in found} == {None}, "it routes nothing"


def test_a_method_that_keeps_the_tasks_writes_with_the_model_of_the_task_told(tmp_path):
    make_writers(tmp_path, "gpt2")
    massmerge.merge(write_recipe(tmp_path, ["a", "b"], method="emr"), tmp_path / "out")
    model = StaticModel(tmp_path / "out")
    for task in ("b", "a"):
        found = model.generate(prompts("gpt2"), task=task, max_new_tokens=NEW)
        dense = opened("gpt2", tmp_path / "out" / task)
        assert [one.tokens for one in found] == [dense_tokens(dense, row) for row in prompts("gpt2")]
    with pytest.raises(InputError, match="Name the task"):
        model.generate(prompts("gpt2"), max_new_tokens=NEW)
    with pytest.raises(InputError, match=r"no head, so there is no label to answer. Use `generate`"):
        model.predict(prompts("gpt2"), task="a")
