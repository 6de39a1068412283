"""Full checkpoints as experts: what of them is backbone, what is head, and what is no version of the base."""

import json
import re

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from massmerge.bundle import Bundle
from massmerge.checkpoints.skeleton import from_matrix
from massmerge.deltas import keep
from massmerge.errors import InputError
from massmerge.merge import merge
from massmerge.prepare import make_plan
from models import (
    FAMILIES,
    assert_same,
    backbone_of,
    open_pair,
    rewrite,
    save_as,
    state_of,
    weights_of,
    write_family,
)

BERT = FAMILIES["bert"]
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def shifted(model, seed=0, scale=0.02):
    """The model with every parameter moved a little, as fine-tuning does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale)
    return model


def write_pair(folder, base, expert):
    base.save_pretrained(folder / "base")
    expert.save_pretrained(folder / "expert")


def write_bert(folder, labels=3):
    """A BERT base and one expert of it; returns both."""
    base = BERT.make_base()
    expert = BERT.make_expert(base, 0, labels)
    write_pair(folder, base, expert)
    return base, expert


# Every architecture


@every_family
def test_an_expert_gives_its_backbone_under_module_names(tmp_path, family):
    base = family.make_base()
    expert = family.make_expert(base, 0, 3)
    write_pair(tmp_path, base, expert)
    opened, read = open_pair(tmp_path)
    backbone = {opened.skeleton.canonical[name] for name in backbone_of(expert, family.base).state_dict()
                if name in opened.skeleton.canonical}  # fmt: skip
    assert read.names() == backbone
    assert_same({name: read.read(name) for name in read.names()}, state_of(expert, family.base))


@every_family
def test_what_the_class_adds_to_the_backbone_is_the_head(tmp_path, family):
    base = family.make_base()
    expert = family.make_expert(base, 0, 3)
    write_pair(tmp_path, base, expert)
    head = open_pair(tmp_path)[1].head
    inside = {id(p) for p in backbone_of(expert, family.base).parameters()}
    added = {name: p.detach() for name, p in expert.named_parameters() if id(p) not in inside}
    assert (set(head.readings) if head else set()) == added.keys()
    for name, tensor in added.items():
        assert head.read(name).equal(tensor)


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES.keys())
def merged(request, tmp_path_factory):
    """A family whose two experts were merged at full rank, and the folder."""
    folder = tmp_path_factory.mktemp("merged")
    merge(write_family(folder, request.param.name, {"one": 2, "two": 3}, budget=100), folder / "out", workers=1)
    return request.param, folder


def test_base_and_factors_of_full_rank_are_the_expert(merged):
    _, folder = merged
    bundle = Bundle(folder / "out")
    base, expert = open_pair(folder, "two")
    rebuilt = {}
    for name in expert.names():
        factors, whole = bundle.factors("two", name), bundle.whole("two", name)
        if whole is not None:
            rebuilt[name] = whole
        else:
            assert factors is not None
            rebuilt[name] = base.read(name) + from_matrix((factors.u * factors.s) @ factors.v, base.slots[name])
    assert_same(rebuilt, weights_of(base, expert), 1e-5)


def test_the_base_in_a_bundle_loads_as_the_base(merged):
    family, folder = merged
    loaded, info = tf.AutoModel.from_pretrained(folder / "out" / "base", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same(loaded.state_dict(), family.make_base().state_dict())


# Every form of file


@pytest.mark.parametrize("form", ["safetensors", "sharded safetensors", "bin", "sharded bin"])
@pytest.mark.parametrize("part", ["base", "expert"])
def test_a_folder_of_any_form_gives_the_model(tmp_path, form, part):
    base = BERT.make_base()
    models = {"base": base, "expert": BERT.make_expert(base, 0, 3)}
    for name, model in models.items():
        save_as(model, tmp_path / name, form if name == part else "safetensors")
    opened, read = open_pair(tmp_path)
    assert_same({name: opened.read(name) for name in opened.slots}, state_of(base, BERT.base))
    assert_same(weights_of(opened, read), state_of(models["expert"], BERT.base))


CONTENTS = {
    "backbone": lambda model: model.bert.state_dict(),
    "backbone with prefix": lambda model: {f"bert.{k}": v for k, v in model.bert.state_dict().items()},
    "backbone with prefix and head": lambda model: model.state_dict(),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
@pytest.mark.parametrize("content", CONTENTS)
def test_a_lone_state_dict_is_an_expert(tmp_path, suffix, content):
    _, expert = write_bert(tmp_path)
    path, state = tmp_path / f"lone{suffix}", CONTENTS[content](expert)
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    opened, read = open_pair(tmp_path, path.name)
    assert_same(weights_of(opened, read), state_of(expert, BERT.base))


@pytest.mark.parametrize("labels", [1, 2, 7])
def test_a_lone_state_dict_with_a_head_tells_its_number_of_labels(tmp_path, labels):
    _, expert = write_bert(tmp_path, labels)
    torch.save(expert.state_dict(), tmp_path / "lone.pt")
    head = open_pair(tmp_path, "lone.pt")[1].head
    assert head.skeleton.class_name == "BertForSequenceClassification"
    assert head.skeleton.config.num_labels == labels
    assert head.read("classifier.weight").equal(expert.classifier.weight)


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in ("clip", "t5")])
def test_the_class_of_a_lone_state_dict_is_found_by_its_head(tmp_path, name):
    family = FAMILIES[name]
    base = family.make_base()
    expert = family.make_expert(base, 0, 5)
    base.save_pretrained(tmp_path / "base")
    torch.save(expert.state_dict(), tmp_path / "lone.pt")
    _, read = open_pair(tmp_path, "lone.pt")
    assert read.head.skeleton.class_name == family.expert.__name__
    assert read.head.skeleton.config.num_labels == 5
    assert_same({n: read.read(n) for n in read.names()}, state_of(expert, family.base))


def test_a_configuration_that_names_no_class_still_names_the_labels(tmp_path):
    _, expert = write_bert(tmp_path)
    expert.config.id2label = {0: "no", 1: "maybe", 2: "yes"}
    config = expert.config.to_dict() | {"architectures": None}
    (tmp_path / "expert" / "config.json").write_text(json.dumps(config))
    head = open_pair(tmp_path)[1].head
    assert head.skeleton.class_name == "BertForSequenceClassification"
    assert list(head.skeleton.config.id2label.values()) == ["no", "maybe", "yes"]


def test_a_lone_state_dict_cannot_be_the_base(tmp_path):
    _, expert = write_bert(tmp_path)
    torch.save(expert.state_dict(), tmp_path / "lone.pt")
    with pytest.raises(InputError, match=r"lone\.pt: a base must be a Hugging Face folder or hub id"):
        open_pair(tmp_path, "expert", "lone.pt")


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
    found = {name: read.read(name) for name in read.names()}
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


# Precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("coarse", ["base", "expert"])
def test_a_tensor_that_fine_tuning_left_alone_has_no_delta_in_another_precision(tmp_path, dtype, coarse):
    base = BERT.make_base()
    fine = {"base": base, "expert": BERT.make_expert(base, 0, scale=0.0)}
    if coarse == "base":  # fine-tuned in float32 from weights published in half precision
        base.to(dtype).float()
        fine["expert"] = BERT.make_expert(base, 0, scale=0.0)
    with torch.no_grad():
        backbone_of(fine["expert"], BERT.base).encoder.layer[0].output.dense.weight.add_(0.1)
    for name, model in fine.items():
        (model.to(dtype) if name == coarse else model).save_pretrained(tmp_path / name)
    opened, read = open_pair(tmp_path)
    moved = [
        name
        for name, slot in opened.slots.items()
        if slot.matrix and keep(opened.read(name), read.read(name), slot.kind, 4) is not None
    ]
    assert moved == ["encoder.layer.0.output.dense.weight"]


# What is no version of the base


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
    "missing": (lambda path: path.unlink(), "no weights in it"),
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
    assert read.read(EMBEDDINGS[name].removeprefix("transformer.")).equal(state[EMBEDDINGS[name]])


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
    assert open_pair(tmp_path)[1].read("shared.weight").equal(state["shared.weight"])


def test_embeddings_that_the_backbone_ties_are_refused_where_their_copies_differ(tmp_path):
    write_twice(tmp_path, "t5", torch.clone)
    rewrite(tmp_path / "expert", lambda s: s | {"encoder.embed_tokens.weight": s["shared.weight"] + 1})
    _, read = open_pair(tmp_path)
    with pytest.raises(InputError, match=r"are one tensor in a T5ForConditionalGeneration but hold different values"):
        read.read("shared.weight")
