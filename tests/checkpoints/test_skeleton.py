"""Models without weights: which tensors they have, and which names in a file mean which of them."""

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

from massmerge.checkpoints.skeleton import Slot, build, from_matrix, to_matrix
from massmerge.errors import InputError
from massmerge.io.tensor_file import TensorInfo
from models import FAMILIES, assert_same, backbone_of, open_pair, rewrite, state_of, weights_of

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def write_pair(folder, name, **changes):
    """A base and an expert of that family; returns the expert."""
    family = FAMILIES[name]
    base = family.make_base(**changes)
    base.save_pretrained(folder / "base")
    expert = family.make_expert(base, 0, 3) if not changes else family.expert(family.make_config(3, **changes))
    expert.save_pretrained(folder / "expert")
    return expert


def rename(folder, *pairs):
    """Replace parts of names in a folder's weights; every part must be there."""

    def renamed(name):
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    def change(state):
        assert all(any(old in name for name in state) for old, _ in pairs)
        return {renamed(name): tensor for name, tensor in state.items()}

    rewrite(folder, change)


# Slots


@every_family
def test_a_skeleton_has_the_tensors_of_the_model(family):
    model = family.make_base()
    skeleton = build(family.make_config())
    assert skeleton.class_name == family.base.__name__
    assert skeleton.canonical.keys() == model.state_dict().keys()
    assert all(slot.shape == model.state_dict()[name].shape for name, slot in skeleton.slots.items())


def test_a_skeleton_holds_no_memory():
    config = tf.LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, num_attention_heads=64)
    assert all(p.device.type == "meta" for p in build(config).model.parameters())


def test_tied_names_are_one_slot():
    skeleton = build(FAMILIES["t5"].make_config(), "T5ForConditionalGeneration")
    assert skeleton.canonical["lm_head.weight"] == skeleton.canonical["encoder.embed_tokens.weight"] == "shared.weight"


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        ("bert", "encoder.layer.0.output.dense.weight", "linear"),
        ("bert", "embeddings.word_embeddings.weight", "embedding"),
        ("bert", "embeddings.LayerNorm.weight", "other"),
        ("bert", "encoder.layer.0.output.dense.bias", "other"),
        ("gpt2", "h.0.attn.c_attn.weight", "conv1d"),
        ("vit", "embeddings.patch_embeddings.projection.weight", "conv"),
        ("vit", "embeddings.cls_token", "other"),
        ("t5", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "embedding"),
    ],
)
def test_the_kind_of_a_tensor_is_that_of_the_module_that_owns_it(family, name, kind):
    assert build(FAMILIES[family].make_config()).slots[name].kind == kind


@pytest.mark.parametrize(
    ("kind", "shape", "matrix"),
    [
        ("linear", (4, 6), (4, 6)),
        ("conv1d", (4, 6), (6, 4)),
        ("conv", (4, 3, 2, 2), (4, 12)),
        ("embedding", (9, 4), (9, 4)),
    ],
)
def test_a_weight_is_its_matrix_and_back(kind, shape, matrix):
    tensor, slot = torch.randn(shape), Slot("x", shape, kind)
    assert slot.matrix == matrix == tuple(to_matrix(tensor, kind).shape)
    assert from_matrix(to_matrix(tensor, kind), slot).equal(tensor)


def test_gpt2_s_matrix_acts_on_activations_from_the_left():
    layer = FAMILIES["gpt2"].make_base().h[0].mlp.c_fc
    x = torch.randn(5, 32)
    assert torch.allclose(x @ to_matrix(layer.weight, "conv1d").T + layer.bias, layer(x), atol=1e-6)


def test_a_class_that_the_library_does_not_have_is_refused_by_name():
    with pytest.raises(InputError, match="has no model class BertForTelepathy"):
        build(FAMILIES["bert"].make_config(), "BertForTelepathy")


# Names of other versions


@every_family
@pytest.mark.parametrize("part", ["base", "expert"])
def test_names_in_a_file_and_names_in_the_module_may_be_mixed(tmp_path, family, part):
    base = family.make_base()
    models = {"base": base, "expert": family.make_expert(base, 0, 3)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    state = {n: p.detach().clone() for n, p in models[part].named_parameters()}  # named once where tied
    save_file(state, tmp_path / part / "model.safetensors", {"format": "pt"})
    opened, read = open_pair(tmp_path)
    assert_same({n: opened.read(n) for n in opened.slots}, base.state_dict())
    assert_same(
        {n: read.read(n).value(None, opened.skeleton.slots[n]) for n in read.names()},
        state_of(models["expert"], family.base),
    )


@pytest.mark.parametrize(
    ("family", "old"),
    [
        ("vit", "vit.encoder.layer.0.attention.attention.query.weight"),
        ("dinov2", "dinov2.encoder.layer.1.attention.attention.value.bias"),
        ("dinov2", "dinov2.encoder.layer.1.attention.output.dense.weight"),
    ],
)
def test_names_of_older_versions_are_what_the_tests_of_mixed_names_have_on_disk(tmp_path, family, old):
    write_pair(tmp_path, family)
    _, read = open_pair(tmp_path)
    assert old in read.store.infos
    assert old.partition(".")[2] not in read.names()


@pytest.mark.parametrize("part", ["base", "expert"])
def test_gamma_and_beta_are_weight_and_bias(tmp_path, part):
    expert = write_pair(tmp_path, "bert")
    rename(tmp_path / part, ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    base, read = open_pair(tmp_path)
    assert base.slots.keys() == read.names()
    assert_same(weights_of(base, read), state_of(expert, tf.BertModel))


@pytest.mark.parametrize("part", ["base", "expert"])
def test_clip_s_tower_may_have_its_prefix(tmp_path, part):
    expert = write_pair(tmp_path, "clip")
    rewrite(tmp_path / part, lambda s: {f"vision_model.{n.removeprefix('vision_model.')}": t for n, t in s.items()})
    base, read = open_pair(tmp_path)
    assert_same(weights_of(base, read), expert.state_dict())


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "distilbert", "vit", "dinov2", "t5", "gpt2", "llama", "modernbert"]
)
def test_a_base_may_have_the_prefix_of_a_task_s_model(tmp_path, name):
    """A folder of a model with a head, cut down to its backbone by hand."""
    family = FAMILIES[name]
    expert = write_pair(tmp_path, name)
    prefix = expert.base_model_prefix + "."
    rewrite(tmp_path / "base", lambda s: {prefix + n.removeprefix(prefix): t for n, t in s.items()})
    base, _ = open_pair(tmp_path)
    assert_same({n: base.read(n) for n in base.slots}, family.make_base().state_dict())


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("bert", {"bert.embeddings.position_ids": torch.arange(40)[None]}),
        ("roberta", {"roberta.embeddings.position_ids": torch.arange(40)[None]}),
        ("bert", {"bert.embeddings.token_type_ids": torch.zeros(1, 40, dtype=torch.int64)}),
        ("clip", {"vision_model.embeddings.position_ids": torch.arange(17)[None]}),
        (
            "gpt2",
            {"transformer.h.0.attn.bias": torch.ones(1, 1, 40, 40), "transformer.h.1.attn.masked_bias": torch.ones(1)},
        ),
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
        ("t5", {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(32, 2)}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
@pytest.mark.parametrize("part", ["base", "expert"])
def test_buffers_that_older_versions_stored_mean_nothing(tmp_path, family, extra, part):
    expert = write_pair(tmp_path, family)
    rewrite(tmp_path / part, lambda s: s | extra)
    opened, read = open_pair(tmp_path)
    assert_same(
        {n: read.read(n).value(None, opened.skeleton.slots[n]) for n in read.names()},
        state_of(expert, FAMILIES[family].base),
    )


def test_a_bias_is_not_taken_for_gpt2_s_buffer_of_that_name():
    skeleton = build(FAMILIES["gpt2"].make_config())
    assert skeleton.match({"h.0.mlp.gate.bias": TensorInfo((2,), torch.float32)}).unexpected == ["h.0.mlp.gate.bias"]


def test_tensors_that_a_converter_splits_have_their_own_shapes(tmp_path):
    write_pair(tmp_path, "dinov2", use_swiglu_ffn=True)
    base, _ = open_pair(tmp_path)
    converted = {n: r for n, r in base.readings.items() if r.converter is not None}
    assert all(base.read(n).shape == r.info.shape == base.slots[n].shape for n, r in converted.items())


def test_matching_lists_what_is_missing_what_is_too_much_and_what_differs():
    skeleton = build(FAMILIES["bert"].make_config())
    infos = {n: TensorInfo(slot.shape, torch.float32) for n, slot in skeleton.slots.items()}
    infos["pooler.dense.bias"] = TensorInfo((5,), torch.float32)
    infos["adapter.weight"] = infos.pop("pooler.dense.weight")
    match = skeleton.match(infos)
    assert match.missing == ["pooler.dense.weight"]
    assert match.unexpected == ["adapter.weight"]
    assert match.mismatched == {"pooler.dense.bias": ((5,), (32,))}


def test_a_part_is_found_by_its_class():
    skeleton = build(FAMILIES["bert"].make_config(), "BertForSequenceClassification")
    assert skeleton.submodule(tf.BertModel) == "bert."
    assert skeleton.submodule(tf.BertForSequenceClassification) == ""
    assert skeleton.submodule(tf.ViTModel) is None


def test_the_backbone_of_a_task_s_model_is_what_the_helpers_say():
    expert = FAMILIES["bert"].make_expert(FAMILIES["bert"].make_base(), 0)
    assert backbone_of(expert, tf.BertModel) is expert.bert
