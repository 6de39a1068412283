"""Bases and experts that are not a plain backbone and its classifier: towers, language heads, weights held twice."""

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from massmerge import load
from massmerge.bundle.reader import Bundle
from massmerge.errors import InputError
from massmerge.merging.open_recipe import make_plan
from massmerge.merging.run import merge
from models import FAMILIES, assert_same, backbone_of, open_pair, rewrite, rows_of, state_of, weights_of
from pairs import BERT, shifted, write_pair

# Bases and experts that are not a plain backbone and its classifier


def test_a_tensor_that_the_base_lacks_is_kept_whole_with_a_warning(tmp_path):
    masked = tf.BertForMaskedLM(BERT.make_config())
    expert = BERT.make_expert(BERT.make_base(), 0)
    write_pair(tmp_path, masked, expert)
    (tmp_path / "recipe.yaml").write_text("base: base\ntasks: [{name: one, expert: expert}]\n")
    plan = make_plan(tmp_path / "recipe.yaml")
    assert plan.errors == []
    assert any("the base has no such tensor" in p.message and "pooler.dense.weight" in p.message for p in plan.problems)
    bundle = Bundle(merge(tmp_path / "recipe.yaml", tmp_path / "out", workers=1))
    assert bundle.whole("one", "pooler.dense.weight").equal(expert.bert.pooler.dense.weight)
    inputs = BERT.make_inputs(3)
    found = load(bundle.path).predict(rows_of(inputs))
    with torch.inference_mode():
        logits = expert(**inputs).logits
    assert [p.logit for p in found] == pytest.approx(logits.amax(1).tolist(), abs=0.02)


def test_the_head_of_a_base_is_left_behind(tmp_path):
    masked = tf.BertForMaskedLM(BERT.make_config())
    write_pair(tmp_path, masked, BERT.make_expert(BERT.make_base(), 0))
    base, _ = open_pair(tmp_path)
    assert base.skeleton.class_name == "BertModel"
    assert_same({n: base.read(n) for n in base.slots}, state_of(masked, tf.BertModel))


def clip_config():
    text = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 64, "max_position_embeddings": 16}  # fmt: skip
    return tf.CLIPConfig(text_config=text, vision_config=FAMILIES["clip"].options, projection_dim=16, num_labels=4)


def make_clip_expert(kind, whole):
    """An expert of that class whose vision tower is a shifted copy of the whole model's."""
    expert = kind(clip_config() if kind is tf.CLIPForImageClassification else clip_config().vision_config)
    tower = backbone_of(expert, tf.CLIPVisionModel)
    tower = tower if type(tower) is not tf.CLIPVisionModelWithProjection else tower.vision_model
    tower.load_state_dict(whole.vision_model.state_dict(), strict=False)
    return shifted(expert)


@pytest.mark.parametrize(
    "kind",
    [tf.CLIPVisionModel, tf.CLIPForImageClassification, tf.CLIPVisionModelWithProjection],
    ids=lambda k: k.__name__,
)
@pytest.mark.parametrize("whole", [True, False], ids=["CLIPModel as base", "tower as base"])
def test_an_expert_of_clip_s_vision_tower_is_read_against_either_base(tmp_path, kind, whole):
    clip = tf.CLIPModel(clip_config())
    expert = make_clip_expert(kind, clip)
    tower = tf.CLIPVisionModel(clip_config().vision_config)
    tower.load_state_dict(clip.vision_model.state_dict(), strict=False)
    write_pair(tmp_path, clip if whole else tower, expert)
    _, read = open_pair(tmp_path)
    found = {name: read.read(name).tensor for name in read.names()}
    theirs = {name.split("vision_model.")[-1]: t for name, t in expert.state_dict().items()}
    assert len(found) >= 38
    assert_same({name.split("vision_model.")[-1]: t for name, t in found.items()}, theirs)


def test_a_clip_model_may_be_an_expert_of_a_clip_model(tmp_path):
    base = tf.CLIPModel(clip_config())
    base.save_pretrained(tmp_path / "base")
    shifted(base).save_pretrained(tmp_path / "expert")
    opened, read = open_pair(tmp_path)
    assert read.head is None
    assert_same(weights_of(opened, read), base.state_dict())


@pytest.mark.parametrize(
    ("name", "tied"), [("t5", True), ("gpt2", True), ("gpt2", False), ("llama", True), ("llama", False)]
)
def test_a_language_head_is_a_head_only_where_it_is_not_tied(tmp_path, name, tied):
    family = FAMILIES[name]
    kind = {"t5": tf.T5ForConditionalGeneration, "gpt2": tf.GPT2LMHeadModel, "llama": tf.LlamaForCausalLM}[name]
    base = family.make_base(tie_word_embeddings=tied)
    torch.manual_seed(3)
    expert = kind(family.make_config(tie_word_embeddings=tied))
    write_pair(tmp_path, base, expert)
    opened, read = open_pair(tmp_path)
    assert_same(weights_of(opened, read), state_of(expert, family.base))
    assert (read.head is None) if tied else (list(read.head.readings) == ["lm_head.weight"])


def test_swiglu_weights_that_the_library_packs_differently_are_read_under_module_names(tmp_path):
    family = FAMILIES["dinov2"]
    base = family.make_base(use_swiglu_ffn=True)
    expert = shifted(tf.Dinov2ForImageClassification(family.make_config(3, use_swiglu_ffn=True)))
    write_pair(tmp_path, base, expert)
    opened, read = open_pair(tmp_path)
    assert_same(weights_of(opened, read), state_of(expert, tf.Dinov2Model))
    assert len(read.names()) == len(base.state_dict())


# Weights that a file holds twice


EMBEDDINGS = {"t5": "shared.weight", "gpt2": "transformer.wte.weight"}


def write_twice(folder, name, change):
    """A base and an expert whose file holds an output layer beside the embeddings that its class ties it to."""
    family = FAMILIES[name]
    expert = shifted({"t5": tf.T5ForConditionalGeneration, "gpt2": tf.GPT2LMHeadModel}[name](family.make_config()))
    write_pair(folder, family.make_base(), expert)
    rewrite(folder / "expert", lambda s: s | {"lm_head.weight": change(s[EMBEDDINGS[name]])})
    return load_file(folder / "expert" / "model.safetensors")


@pytest.mark.parametrize("name", ["t5", "gpt2"])
def test_a_pickle_that_names_tied_weights_twice_has_them_once(tmp_path, name):
    state = write_twice(tmp_path, name, torch.clone)
    (tmp_path / "expert" / "model.safetensors").unlink()
    torch.save(state | {"lm_head.weight": state[EMBEDDINGS[name]]}, tmp_path / "expert" / "pytorch_model.bin")
    _, read = open_pair(tmp_path)
    assert read.head is None
    assert read.read(EMBEDDINGS[name].removeprefix("transformer.")).tensor.equal(state[EMBEDDINGS[name]])


@pytest.mark.parametrize("name", ["t5", "gpt2"])
@pytest.mark.parametrize("change", [torch.clone, lambda t: t + 1], ids=["equal", "unequal"])
def test_an_output_layer_stored_beside_the_embeddings_is_the_head(tmp_path, name, change):
    state = write_twice(tmp_path, name, change)
    _, read = open_pair(tmp_path)
    assert list(read.head.readings) == ["lm_head.weight"]
    assert read.head.read("lm_head.weight").equal(state["lm_head.weight"])


def test_a_lone_state_dict_with_an_output_layer_of_its_own_keeps_it(tmp_path):
    state = write_twice(tmp_path, "t5", lambda t: t + 1)
    save_file(state, tmp_path / "lone.safetensors")
    head = open_pair(tmp_path, "lone.safetensors")[1].head
    assert head.read("lm_head.weight").equal(state["lm_head.weight"])


def test_embeddings_that_the_backbone_ties_are_read_where_their_copies_agree(tmp_path):
    state = write_twice(tmp_path, "t5", torch.clone)
    rewrite(tmp_path / "expert", lambda s: s | {"encoder.embed_tokens.weight": s["shared.weight"].clone()})
    assert open_pair(tmp_path)[1].read("shared.weight").tensor.equal(state["shared.weight"])


def test_embeddings_that_the_backbone_ties_are_refused_where_their_copies_differ(tmp_path):
    write_twice(tmp_path, "t5", torch.clone)
    rewrite(tmp_path / "expert", lambda s: s | {"encoder.embed_tokens.weight": s["shared.weight"] + 1})
    _, read = open_pair(tmp_path)
    with pytest.raises(InputError, match=r"are one tensor in a T5ForConditionalGeneration but hold different values"):
        read.read("shared.weight")
