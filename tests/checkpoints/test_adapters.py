"""LoRA adapters as experts, made by the library that users make them with."""

import json
import re
import time

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from massmerge.bundle.reader import Bundle
from massmerge.checkpoints import AdapterExpert, LowRank, adapters
from massmerge.errors import InputError
from massmerge.merging.open_recipe import make_plan
from massmerge.merging.run import merge
from models import FAMILIES, assert_same, open_pair, rewrite, state_of, weights_of, write_recipe

BERT = FAMILIES["bert"]


def trained(model, seed=0):
    """The wrapped model with every trainable parameter moved, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def write_adapter(folder, name="bert", kind=None, adapter="expert", changes=None, seed=0, **options):
    """A base in `base` and an adapter over a model of that class; returns the merged model."""
    family = FAMILIES[name]
    base = family.make_base(**(changes or {}))
    base.save_pretrained(folder / "base")
    kind = kind or family.expert
    torch.manual_seed(5 + seed)
    task_model = kind.from_pretrained(folder / "base", **({} if kind is family.base else {"num_labels": 3}))
    wrapped = trained(peft.get_peft_model(task_model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **options})), seed)
    wrapped.save_pretrained(folder / adapter)
    return wrapped.merge_and_unload()


def assert_merged(base, expert, expected, kind):
    """Base and update are the backbone of the merged model, which may do without the base's pooler."""
    found, state = weights_of(base, expert), state_of(expected, kind)
    assert all("pooler" in name for name in found.keys() - state.keys())
    assert_same({name: tensor for name, tensor in found.items() if name in state}, state, 1e-5)


def edit(folder, **changes):
    """Change fields of an adapter's configuration."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


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


# DoRA


def test_a_dora_adapter_is_read_as_the_full_weights_that_peft_makes_of_it(tmp_path):
    expected = write_adapter(tmp_path, target_modules=["query", "dense"], use_dora=True)
    base, expert = open_pair(tmp_path)
    assert_merged(base, expert, expected, BERT.base)
    name = "encoder.layer.0.attention.self.query.weight"
    assert expert.rank_limit(name) is None and not isinstance(expert.read(name), LowRank)


def test_a_dora_adapter_without_its_magnitudes_is_refused(tmp_path):
    write_adapter(tmp_path, target_modules=["query"], use_dora=True)
    rewrite(tmp_path / "expert", lambda s: {k: t for k, t in s.items() if "magnitude" not in k})
    assert "with their magnitudes" in refusal(tmp_path)


# Refusals


def refusal(folder):
    with pytest.raises(InputError) as caught:
        open_pair(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa"),
        ({"init_lora_weights": "olora"}, "init_lora_weights: olora"),
    ],
    ids=["PiSSA", "OLoRA"],
)
def test_other_kinds_of_lora_are_refused_by_name(tmp_path, options, kind):
    write_adapter(tmp_path, target_modules=["query"], **options)
    message = refusal(tmp_path)
    assert kind in message
    assert "Merge it into a full model" in message


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["query"], feedforward_modules=[]),
        peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2),
        peft.LoHaConfig(target_modules=["query"]),
    ],
    ids=lambda c: c.peft_type.value,
)
def test_adapters_that_are_not_lora_are_refused_by_kind(tmp_path, config):
    BERT.make_base().save_pretrained(tmp_path / "base")
    model = BERT.expert.from_pretrained(tmp_path / "base")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "expert")
    assert re.search(rf"is a {config.peft_type.value} adapter.*Merge it into a full model", refusal(tmp_path))


def test_an_adapter_for_a_base_of_another_size_lists_every_module_with_both_shapes(tmp_path):
    write_adapter(tmp_path, changes={"intermediate_size": 48}, target_modules=["dense"])
    BERT.make_base().save_pretrained(tmp_path / "base")
    message = refusal(tmp_path)
    for layer in (0, 1):
        assert f"encoder.layer.{layer}.intermediate.dense: updates a (48, 32) matrix, the base's is (64, 32)" in message
        assert f"encoder.layer.{layer}.output.dense: updates a (32, 48) matrix, the base's is (32, 64)" in message
    assert "made for another base" in message


def test_an_adapter_for_a_deeper_base_lists_every_module_that_is_missing(tmp_path):
    write_adapter(tmp_path, changes={"num_hidden_layers": 4}, target_modules=["query", "key"])
    BERT.make_base().save_pretrained(tmp_path / "base")
    message = refusal(tmp_path)
    missing = {f"encoder.layer.{i}.attention.self.{m}" for i in (2, 3) for m in ("query", "key")}
    assert {m.removeprefix("bert.") for m in re.findall(r"(\S+): not in the base's BertModel", message)} == missing


def test_an_adapter_for_another_architecture_is_refused_with_its_base_named(tmp_path):
    write_adapter(tmp_path, "vit", target_modules=["q_proj"], modules_to_save=["classifier"])
    edit(tmp_path / "expert", base_model_name_or_path="google/vit")
    BERT.make_base().save_pretrained(tmp_path / "base")
    message = refusal(tmp_path)
    assert "made for another base (google/vit)" in message
    assert "q_proj" in message


def test_an_adapter_that_saved_other_embeddings_than_the_base_s_is_refused(tmp_path):
    write_adapter(tmp_path, "llama", target_modules=["embed_tokens"])
    rewrite(tmp_path / "expert", lambda s: {n: t + 1 if "base_layer" in n else t for n, t in s.items()})
    _, expert = open_pair(tmp_path)
    with pytest.raises(
        InputError, match=r"expert: made for another base: it updates embed_tokens\.weight, whose values"
    ):
        expert.read("embed_tokens.weight")


def test_a_bias_of_the_update_for_a_layer_without_one_must_be_nothing(tmp_path):
    base = FAMILIES["llama"].make_base()
    base.save_pretrained(tmp_path / "base")
    wrapped = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], lora_bias=True))
    wrapped.save_pretrained(tmp_path / "expert")
    assert {n for n in open_pair(tmp_path)[1].names() if n.endswith("bias")} == set()
    trained(wrapped, 0).save_pretrained(tmp_path / "expert")
    expert = open_pair(tmp_path)[1]
    with pytest.raises(InputError, match=r"adds a bias to layers.0.self_attn.q_proj.weight, whose layer has none"):
        expert.read("layers.0.self_attn.q_proj.weight")


def test_two_updates_of_one_tied_tensor_are_refused_and_none_is_dropped(tmp_path):
    write_adapter(tmp_path, "t5", target_modules=["embed_tokens"], task_type="SEQ_2_SEQ_LM")
    assert re.search(r"embed_tokens: tied to another module that the adapter updates too", refusal(tmp_path))


def test_half_of_a_pair_is_refused_by_name(tmp_path):
    write_adapter(tmp_path, target_modules=["query"])
    rewrite(tmp_path / "expert", lambda s: {n: t for n, t in s.items() if not ("layer.1" in n and "lora_B" in n)})
    assert re.search(r"layer\.1\.attention\.self\.query: only one of its two matrices", refusal(tmp_path))


def test_an_adapter_without_lora_matrices_is_refused(tmp_path):
    write_adapter(tmp_path, target_modules=["query"], modules_to_save=["classifier"])
    rewrite(tmp_path / "expert", lambda s: {n: t for n, t in s.items() if "lora" not in n})
    assert "holds no LoRA matrices" in refusal(tmp_path)


def test_an_adapter_without_weights_is_refused_with_the_names_looked_for(tmp_path):
    write_adapter(tmp_path, target_modules=["query"])
    (tmp_path / "expert" / "adapter_model.safetensors").unlink()
    assert "looked for adapter_model.safetensors, adapter_model.bin" in refusal(tmp_path)


def test_a_lora_over_the_head_is_refused_and_not_dropped(tmp_path):
    write_adapter(tmp_path, target_modules=["query", "classifier"])
    assert "classifier" in refusal(tmp_path)


def test_a_lora_over_an_output_layer_is_not_taken_for_one_over_the_embeddings_it_was_tied_to(tmp_path):
    options = {"target_modules": ["lm_head", "c_attn"], "task_type": "CAUSAL_LM", "fan_in_fan_out": True}
    write_adapter(tmp_path, "gpt2", tf.GPT2LMHeadModel, **options)
    assert "lm_head: not in the base's GPT2Model" in refusal(tmp_path)


def test_an_output_layer_saved_whole_leaves_the_embeddings_alone(tmp_path):
    options = {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"], "fan_in_fan_out": True}
    expected = write_adapter(tmp_path, "gpt2", tf.GPT2LMHeadModel, **options)
    _, expert = open_pair(tmp_path)
    assert "wte.weight" not in expert.names()
    assert expert.head.read("lm_head.weight").equal(expected.lm_head.weight)


def test_a_folder_with_an_adapter_configuration_is_an_adapter(tmp_path):
    write_adapter(tmp_path, target_modules=["query"])
    assert isinstance(open_pair(tmp_path)[1], AdapterExpert)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_alpha": None}, "lora_alpha: None. Input should be a valid number"),
        ({"lora_alpha": "much"}, "lora_alpha: 'much'. Input should be a valid number"),
        ({"alpha_pattern": {"query": []}}, r"alpha_pattern\.query: \[\]. Input should be a valid number"),
    ],
)
def test_a_scale_that_is_no_number_is_refused_with_its_key(tmp_path, changes, words):
    write_adapter(tmp_path, target_modules=["query"])
    edit(tmp_path / "expert", **changes)
    with pytest.raises(InputError, match=words):
        open_pair(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(query", "is not a valid regular expression"),
        ("*", "is not a valid regular expression"),
        ("(" * 900, "is not a valid regular expression"),
        ("(?:a{65535}){65535}", "counted repetitions"),
        ("x" * 2000, "at most 1000 characters"),
    ],
)
def test_a_pattern_that_cannot_be_read_is_refused_in_time(tmp_path, pattern, words):
    write_adapter(tmp_path, target_modules=["query"])
    edit(tmp_path / "expert", alpha_pattern={pattern: 4})
    began = time.monotonic()
    with pytest.raises(InputError, match=words):
        open_pair(tmp_path)
    assert time.monotonic() - began < 10


def test_a_pattern_that_takes_too_long_is_refused(monkeypatch):
    """Which patterns do depends on the library; one that always does stands for them."""

    class Endless:
        def match(self, module, timeout):
            assert timeout <= 5
            raise TimeoutError

    monkeypatch.setattr(adapters.regex, "compile", lambda text: Endless())
    alphas = adapters._Alphas(adapters._options({"alpha_pattern": {"(a+)+$": 4}}))
    with pytest.raises(
        InputError, match=r"adapter_config\.json has alpha_pattern '\(a\+\)\+\$', which takes more than 5 s"
    ):
        alphas.of("encoder.layer.0.query")


@pytest.mark.parametrize(
    "changes",
    [{"alpha_pattern": ["query"]}, {"alpha_pattern": {"query": float("nan")}}, {"lora_alpha": float("inf")},
     {"lora_alpha": True}, {"auto_mapping": "BertModel"}, {"auto_mapping": {"base_model_class": ["BertModel"]}}],
)  # fmt: skip
def test_an_adapter_s_configuration_of_another_form_is_refused(tmp_path, changes):
    write_adapter(tmp_path, target_modules=["query"])
    edit(tmp_path / "expert", **changes)
    with pytest.raises(InputError, match=r"its adapter_config\.json has"):
        open_pair(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda name, t: t[:0] if "lora_A" in name else t[:, :0], "its rank is 0"),
        (lambda name, t: t[:1] if "lora_A" in name else t, "cannot be multiplied"),
        (lambda name, t: t.reshape(-1) if "lora_A" in name else t, "cannot be multiplied"),
    ],
    ids=["rank 0", "two ranks", "no matrix"],
)
def test_matrices_that_have_no_product_are_refused_by_name(tmp_path, change, words):
    write_adapter(tmp_path, target_modules=["query"])
    rewrite(tmp_path / "expert", lambda state: {name: change(name, tensor) for name, tensor in state.items()})
    with pytest.raises(InputError, match=rf"attention\.self\.query: .*{words}"):
        open_pair(tmp_path)


def test_an_adapter_that_names_no_kind_is_refused(tmp_path):
    write_adapter(tmp_path, target_modules=["query"])
    path = tmp_path / "expert" / "adapter_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "peft_type"}))
    with pytest.raises(InputError, match="has no peft_type"):
        open_pair(tmp_path)
