"""Full checkpoints as experts, of every architecture, form of file and precision."""

import json

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

from massmerge.bundle.reader import Bundle
from massmerge.checkpoints.skeleton import from_matrix
from massmerge.errors import InputError
from massmerge.merging.run import merge
from models import FAMILIES, assert_same, backbone_of, open_pair, save_as, state_of, weights_of, write_family
from pairs import BERT, write_bert, write_pair

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


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
    assert_same({name: read.read(name).tensor for name in read.names()}, state_of(expert, family.base))


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
    assert_same({n: read.read(n).tensor for n in read.names()}, state_of(expert, family.base))


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
        if slot.matrix and read.read(name).keep(opened.read(name), slot.kind, 4) is not None
    ]
    assert moved == ["encoder.layer.0.output.dense.weight"]
