"""LoRA adapters as experts, made by the library that users make them with."""

import json

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from lora import write_adapter
from massmerge.bundle.reader import Bundle
from massmerge.checkpoints import AdapterExpert, LowRank
from massmerge.merging.open_recipe import make_plan
from massmerge.merging.run import merge
from models import FAMILIES, assert_same, open_pair, rewrite, state_of, weights_of, write_recipe

BERT = FAMILIES["bert"]


def assert_merged(base, expert, expected, kind):
    """Base and update are the backbone of the merged model, which may do without the base's pooler."""
    found, state = weights_of(base, expert), state_of(expected, kind)
    assert all("pooler" in name for name in found.keys() - state.keys())
    assert_same({name: tensor for name, tensor in found.items() if name in state}, state, 1e-5)


# Every kind of low-rank update


CASES = {
    "plain": {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"},
    "rank-stabilised": {"target_modules": ["query", "value"], "use_rslora": True, "task_type": "SEQ_CLS"},
    "all linear layers": {"target_modules": "all-linear", "task_type": "SEQ_CLS"},
    "patterns": {
        "target_modules": ["query", "value", "dense"],
        "rank_pattern": {"layer.0.attention.self.query": 2, r"layer\.1\..*dense": 3},
        "alpha_pattern": {"value": 20, r"^bert\.encoder\.layer\.1\.intermediate\.dense": 3},
        "task_type": "SEQ_CLS",
    },
    "patterns, rank-stabilised": {
        "target_modules": ["query", "key"], "rank_pattern": {"key": 9}, "alpha_pattern": {"key": 2}, "use_rslora": True,
    },
    "one layer": {"target_modules": ["query"], "layers_to_transform": [1], "task_type": "SEQ_CLS"},
    "embeddings": {"target_modules": ["word_embeddings", "query"], "task_type": "SEQ_CLS"},
    "biases of the model": {"target_modules": ["query"], "bias": "all", "task_type": "SEQ_CLS"},
    "biases of the updated layers": {"target_modules": ["query"], "bias": "lora_only", "task_type": "SEQ_CLS"},
    "biases of the update": {"target_modules": ["query", "dense"], "lora_bias": True, "use_rslora": True},
    "classifier by hand": {"target_modules": ["query"], "modules_to_save": ["classifier"]},
    "pooler saved whole": {"target_modules": ["query"], "modules_to_save": ["classifier", "pooler"]},
    "no head": {"target_modules": ["query"]},
    "rank above the matrix": {"target_modules": ["query"], "r": 40, "task_type": "SEQ_CLS"},
}  # fmt: skip


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_base_and_update_are_the_merged_model(tmp_path, options):
    expected = write_adapter(tmp_path, **options)
    base, expert = open_pair(tmp_path)
    assert_merged(base, expert, expected, BERT.base)


OTHERS = {
    "roberta": ("roberta", None, {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}),
    "distilbert": ("distilbert", None, {"target_modules": ["q_lin", "v_lin"], "task_type": "SEQ_CLS"}),
    "modernbert": ("modernbert", None, {"target_modules": ["Wqkv", "Wo"], "task_type": "SEQ_CLS"}),
    "gpt2": ("gpt2", None, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "task_type": "SEQ_CLS"}),
    "gpt2 embeddings": ("gpt2", None, {"target_modules": ["wte", "c_fc"], "fan_in_fan_out": True, "task_type": "SEQ_CLS"}),
    "gpt2 language model": (
        "gpt2", tf.GPT2LMHeadModel, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"},
    ),
    "llama": ("llama", None, {"target_modules": ["q_proj", "down_proj"], "task_type": "SEQ_CLS"}),
    "llama embeddings": ("llama", None, {"target_modules": ["embed_tokens", "q_proj"], "task_type": "SEQ_CLS"}),
    "llama language model": ("llama", tf.LlamaForCausalLM, {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}),
    "t5": ("t5", None, {"target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"}),
    "vit": ("vit", None, {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]}),
    "vit patches": ("vit", None, {"target_modules": ["projection", "fc1"], "modules_to_save": ["classifier"]}),
    "dinov2 patches": ("dinov2", None, {"target_modules": ["projection", "q_proj"], "modules_to_save": ["classifier"]}),
    "clip": ("clip", None, {"target_modules": ["q_proj", "fc2"]}),
    "bert features": ("bert", tf.BertModel, {"target_modules": ["query"], "task_type": "FEATURE_EXTRACTION"}),
    "vit features": ("vit", tf.ViTModel, {"target_modules": ["q_proj"]}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "options"), OTHERS.values(), ids=OTHERS.keys())
def test_an_adapter_of_any_architecture_gives_the_merged_model(tmp_path, name, kind, options):
    expected = write_adapter(tmp_path, name, kind, **options)
    base, expert = open_pair(tmp_path)
    assert any(isinstance(expert.read(n), LowRank) for n in expert.names())
    assert_merged(base, expert, expected, FAMILIES[name].base)


def test_an_adapter_may_be_a_pickle(tmp_path):
    expected = write_adapter(tmp_path, target_modules=["query"], task_type="SEQ_CLS")
    weights = tmp_path / "expert" / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    base, expert = open_pair(tmp_path)
    assert_merged(base, expert, expected, BERT.base)


def test_names_of_an_older_version_are_those_of_the_module(tmp_path):
    """An adapter trained when ViT's layers were called `encoder.layer.0.attention.attention.query`."""
    expected = write_adapter(tmp_path, "vit", target_modules=["q_proj"], modules_to_save=["classifier"])
    rewrite(
        tmp_path / "expert",
        lambda s: {n.replace(".layers.", ".encoder.layer.").replace("attention.q_proj", "attention.attention.query"): t
                   for n, t in s.items()},
    )  # fmt: skip
    base, expert = open_pair(tmp_path)
    assert len(expert.pairs) == 2
    assert_merged(base, expert, expected, tf.ViTModel)


# The update stays what it is


def test_a_delta_is_given_as_two_thin_matrices(tmp_path):
    write_adapter(tmp_path, target_modules=["query"], task_type="SEQ_CLS")
    _, expert = open_pair(tmp_path)
    name = "encoder.layer.0.attention.self.query.weight"
    given = expert.read(name)
    assert isinstance(given, LowRank)
    assert (given.b.shape, given.a.shape) == ((32, 4), (4, 32))


@pytest.mark.parametrize(("rank", "limit"), [(4, 4), (32, 32), (50, 32)])
def test_the_rank_is_known_beforehand_and_never_above_the_matrix(tmp_path, rank, limit):
    write_adapter(tmp_path, target_modules=["query"], r=rank)
    assert open_pair(tmp_path)[1].rank_limit("encoder.layer.0.attention.self.query.weight") == limit


def test_only_what_the_adapter_touches_is_named(tmp_path):
    write_adapter(tmp_path, target_modules=["query"], layers_to_transform=[1], task_type="SEQ_CLS")
    assert open_pair(tmp_path)[1].names() == {"encoder.layer.1.attention.self.query.weight"}


def test_a_bundle_of_adapters_weighs_the_base_and_the_adapters(tmp_path):
    changes = {"vocab_size": 4000}
    for seed, task in enumerate(["one", "two"]):
        write_adapter(tmp_path, adapter=task, changes=changes, seed=seed, target_modules=["query", "value"], r=2)
    bundle = Bundle(merge(write_recipe(tmp_path, ["one", "two"]), tmp_path / "out", workers=1))
    numbers = 2 * 4 * 2 * (32 + 1 + 32)  # tasks, matrices, rank, triplets
    assert sum(len(ranks) * 2 for ranks in bundle.ranks.values()) == 2 * 4 * 2
    assert bundle.bytes_of("tasks/") < 4 * numbers + 8000
    assert bundle.counted_bytes < 1.1 * bundle.base_bytes


def test_adapters_and_full_experts_may_stand_in_one_recipe(tmp_path):
    expected = write_adapter(tmp_path, adapter="thin", target_modules=["query"], task_type="SEQ_CLS")
    BERT.make_expert(BERT.make_base(), 1, 2).save_pretrained(tmp_path / "full")
    plan = make_plan(write_recipe(tmp_path, ["full", "thin"], budget=100))
    assert plan.problems == ()
    assert [t.form for t in plan.tasks] == ["full", "adapter"]
    bundle = Bundle(merge(tmp_path / "recipe.yaml", tmp_path / "out", workers=1))
    name = "encoder.layer.0.attention.self.query.weight"
    factors = bundle.factors("thin", name)
    rebuilt = BERT.make_base().state_dict()[name] + (factors.u * factors.s) @ factors.v
    assert_same({name: rebuilt}, state_of(expected, BERT.base), 1e-5)
    assert bundle.factors("thin", "encoder.layer.0.output.dense.weight") is None


# Heads


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
        ("bert", {"target_modules": ["query"], "modules_to_save": ["classifier"]}),
        ("roberta", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
        ("vit", {"target_modules": ["q_proj"], "modules_to_save": ["classifier"]}),
        ("dinov2", {"target_modules": ["q_proj"], "modules_to_save": ["classifier"]}),
        ("llama", {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}),
    ],
    ids=["by task type", "by hand", "of two layers", "vit", "dinov2", "llama"],
)
def test_what_the_adapter_saved_beside_the_backbone_is_the_head(tmp_path, name, options):
    expected = write_adapter(tmp_path, name, **options)
    head = open_pair(tmp_path)[1].head
    assert head.skeleton.class_name == FAMILIES[name].expert.__name__
    assert head.skeleton.config.num_labels == 3
    assert head.readings
    for key in head.readings:
        assert head.read(key).equal(expected.state_dict()[key])


def test_an_adapter_without_its_head_says_so(tmp_path):
    write_adapter(tmp_path, target_modules=["query"])
    (tmp_path / "expert" / "config.json").write_text(BERT.expert(BERT.make_config(3)).config.to_json_string())
    config = json.loads((tmp_path / "expert" / "config.json").read_text())
    (tmp_path / "expert" / "config.json").write_text(json.dumps(config | {"architectures": [BERT.expert.__name__]}))
    expert = open_pair(tmp_path)[1]
    assert expert.head is None
    assert any("modules_to_save" in w and "classifier.weight" in w for w in expert.warnings)


def test_an_output_layer_saved_whole_leaves_the_embeddings_alone(tmp_path):
    options = {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"], "fan_in_fan_out": True}
    expected = write_adapter(tmp_path, "gpt2", tf.GPT2LMHeadModel, **options)
    _, expert = open_pair(tmp_path)
    assert "wte.weight" not in expert.names()
    assert expert.head.read("lm_head.weight").equal(expected.lm_head.weight)


def test_a_folder_with_an_adapter_configuration_is_an_adapter(tmp_path):
    write_adapter(tmp_path, target_modules=["query"])
    assert isinstance(open_pair(tmp_path)[1], AdapterExpert)


# DoRA


def test_a_dora_adapter_is_read_as_the_full_weights_that_peft_makes_of_it(tmp_path):
    expected = write_adapter(tmp_path, target_modules=["query", "dense"], use_dora=True)
    base, expert = open_pair(tmp_path)
    assert_merged(base, expert, expected, BERT.base)
    name = "encoder.layer.0.attention.self.query.weight"
    assert expert.rank_limit(name) is None and not isinstance(expert.read(name), LowRank)
