"""What is wrong with an adapter is said by name: its kind, its base, a module, a key of its configuration."""

import json
import re
import time

import peft
import pytest
import transformers as tf

from lora import edit, trained, write_adapter
from massmerge.checkpoints import adapters
from massmerge.errors import InputError
from models import FAMILIES, open_pair, rewrite

BERT = FAMILIES["bert"]


def refusal(folder):
    with pytest.raises(InputError) as caught:
        open_pair(folder)
    return str(caught.value)


def test_a_dora_adapter_without_its_magnitudes_is_refused(tmp_path):
    write_adapter(tmp_path, target_modules=["query"], use_dora=True)
    rewrite(tmp_path / "expert", lambda s: {k: t for k, t in s.items() if "magnitude" not in k})
    assert "with their magnitudes" in refusal(tmp_path)


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
