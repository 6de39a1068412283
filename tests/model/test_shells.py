"""Heads at work: shells cut from task models, linear heads from files, tasks without a head."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch.nn.functional import normalize
from transformers import AutoModel

import massmerge
from massmerge import InputError
from massmerge.checkpoints.skeleton import build
from massmerge.model.heads import classify
from massmerge.model.heads.classify import ShellHead, load_head
from massmerge.model.heads.linear import LinearHead, features
from models import FAMILIES, backbone_of, dense_changes, family_bundle, logits_of, rows_of, write_family
from naive import tsv_merge

CLASSIFIERS = [name for name in FAMILIES if name not in ("t5", "clip")]


def shell_of(root, name, task="b"):
    bundle = family_bundle(root, name)
    base = AutoModel.from_pretrained(bundle / "base").eval()
    return load_head(bundle / "tasks" / task / "head", base), base, bundle


# Shells


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_shell_gives_the_logits_of_its_task_s_model_for_the_output_of_its_backbone(root, name):
    shell, base, bundle = shell_of(root, name)
    expert = FAMILIES[name].expert.from_pretrained(bundle.parent / "b").eval()
    inputs = FAMILIES[name].make_inputs(3)
    with torch.inference_mode():
        inside = backbone_of(expert, FAMILIES[name].base)
        output = inside(**shell.backbone_call(inputs, base))
        expected = expert(**inputs).logits
    assert torch.allclose(shell(output, inputs), expected, atol=1e-5)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_shell_holds_no_weight_of_the_backbone(root, name):
    shell, base, _ = shell_of(root, name)
    head = sum(p.numel() for p in shell._filled[0].parameters())
    assert head < 0.2 * sum(p.numel() for p in base.parameters())


def test_a_shell_does_not_drop_anything_out(root):
    shell, base, _ = shell_of(root, "bert")
    inputs = FAMILIES["bert"].make_inputs(2)
    with torch.inference_mode():
        output = base(**inputs)
        output["pooler_output"] = torch.randn(2, 32)
    assert torch.equal(shell(output, inputs), shell(output, inputs))


def test_a_head_that_lacks_a_tensor_is_refused_by_name(root, tmp_path):
    _, base, bundle = shell_of(root, "bert")
    folder = bundle / "tasks" / "b" / "head"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file({"classifier.weight": torch.zeros(3, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"the head lacks classifier\.bias"):
        ShellHead(tmp_path, base)


def test_a_head_of_another_architecture_is_refused_by_name(root, tmp_path):
    bundle = family_bundle(root, "bert")
    other = FAMILIES["distilbert"].make_base()
    with pytest.raises(InputError, match="a BertForSequenceClassification has no DistilBertModel in it"):
        ShellHead(bundle / "tasks" / "b" / "head", other)


def test_a_task_without_a_head_has_none(root):
    bundle = family_bundle(root, "clip")
    assert load_head(bundle / "tasks" / "a" / "head", AutoModel.from_pretrained(bundle / "base")) is None


# Features


class Output:
    def __init__(self, hidden, pooled=None, encoder=None):
        self.last_hidden_state, self.pooler_output, self.encoder_last_hidden_state = hidden, pooled, encoder


HIDDEN, POOLED = torch.randn(2, 5, 8), torch.randn(2, 8)
TEXT = {"input_ids": torch.ones(2, 5), "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])}
IMAGE = {"pixel_values": torch.ones(2, 3, 4, 4)}


def test_features_are_the_pooled_output_where_there_is_one():
    assert torch.equal(features(Output(HIDDEN, POOLED), TEXT), POOLED)


def test_features_of_text_are_the_mean_over_real_tokens():
    expected = torch.stack([HIDDEN[0, :3].mean(0), HIDDEN[1].mean(0)])
    assert torch.allclose(features(Output(HIDDEN), TEXT), expected, atol=1e-6)


def test_features_of_images_are_the_first_token():
    assert torch.equal(features(Output(HIDDEN), IMAGE), HIDDEN[:, 0])


def test_features_of_an_encoder_decoder_are_those_of_the_prompt():
    found = features(Output(torch.zeros(2, 1, 8), encoder=HIDDEN), TEXT)
    assert torch.allclose(found[1], HIDDEN[1].mean(0), atol=1e-6)


def test_features_can_be_asked_for_by_name():
    output = Output(HIDDEN, POOLED)
    assert torch.equal(features(output, TEXT, "cls"), HIDDEN[:, 0])
    assert torch.allclose(features(output, TEXT, "mean")[1], HIDDEN[1].mean(0), atol=1e-6)
    assert torch.equal(features(output, TEXT, "pooled"), POOLED)


def test_a_pooled_output_that_is_not_there_is_refused_with_the_choices():
    with pytest.raises(InputError, match="no pooled output; choose `features: cls` or `mean`"):
        features(Output(HIDDEN), TEXT, "pooled")


# Linear heads


def clip_bundle(folder, **options):
    """Two CLIP tasks with linear heads of their own; returns the bundle and the heads' weights."""
    recipe = write_family(folder, "clip", {"a": 2, "b": 2}, rank=8)
    data = yaml.safe_load(recipe.read_text())
    torch.manual_seed(5)
    weights = {}
    for task, labels in zip(data["tasks"], (["cat", "dog"], ["car", "bus", "van"]), strict=True):
        weights[task["name"]] = {"weight": torch.randn(len(labels), 32), "bias": torch.randn(len(labels))}
        save_file(weights[task["name"]], folder / f"{task['name']}.safetensors")
        task["head"] = {"weights": f"{task['name']}.safetensors", "labels": labels, **options}
    data["shared_labels"] = [["a/cat", "b/van"]]
    recipe.write_text(yaml.safe_dump(data))
    massmerge.merge(recipe, folder / "bundle")
    return folder / "bundle", weights


@pytest.mark.parametrize("options", [{}, {"normalize": True, "scale": 20.0}, {"features": "mean"}, {"features": "cls"}])
def test_a_linear_head_is_its_layer_on_the_features_it_names(tmp_path, options):
    bundle, weights = clip_bundle(tmp_path, **options)
    model = massmerge.load(bundle)
    inputs = FAMILIES["clip"].make_inputs(3)
    dense = FAMILIES["clip"].base.from_pretrained(tmp_path / "base").eval()
    dense.load_state_dict(dense_changes(bundle, dense, ["b"], tsv_merge), strict=False)
    with torch.inference_mode():
        output = dense(**inputs)
    kinds = {"auto": output.pooler_output, "mean": output.last_hidden_state.mean(1),
             "cls": output.last_hidden_state[:, 0]}  # fmt: skip
    x = kinds[options.get("features", "auto")]
    x = normalize(x, dim=1) * options["scale"] if options.get("normalize") else x
    expected = x @ weights["b"]["weight"].mT + weights["b"]["bias"]
    for row, prediction in zip(expected, model.predict(rows_of(inputs), task="b", top=3), strict=True):
        found = logits_of(prediction)
        for label, value in zip(("car", "bus", "van"), row, strict=True):
            assert abs(found["b", label] - float(value)) < 1e-4 * max(1, abs(float(value)))


def test_a_linear_head_without_a_bias_has_none(tmp_path):
    save_file({"weight": torch.eye(8)[:2].contiguous()}, tmp_path / "model.safetensors")
    (tmp_path / "linear.json").write_text('{"normalize": false, "scale": 2.0}')
    head = LinearHead(tmp_path, torch.device("cpu"))
    assert torch.allclose(head(Output(HIDDEN, POOLED), TEXT), 2 * POOLED[:, :2])


def test_labels_that_several_tasks_share_are_kept_in_the_bundle(tmp_path):
    bundle, _ = clip_bundle(tmp_path)
    assert massmerge.load(bundle).shared_labels == [["a/cat", "b/van"]]


def test_a_shared_label_that_no_task_has_is_refused(tmp_path):
    recipe = write_family(tmp_path, "bert", {"a": 2, "b": 2}, rank=4)
    data = {**yaml.safe_load(recipe.read_text()), "shared_labels": [["a/LABEL_0", "b/LABEL_9"]]}
    recipe.write_text(yaml.safe_dump(data))
    with pytest.raises(InputError, match=r"'b/LABEL_9' is not a label of any task"):
        massmerge.merge(recipe, tmp_path / "bundle")


# Tasks without a head


@pytest.mark.parametrize("name", ["clip", "t5"])
def test_tasks_without_heads_are_told_by_name_with_what_works_instead(root, name):
    model = massmerge.load(family_bundle(root, name))
    rows = rows_of(FAMILIES[name].make_inputs(1))
    with pytest.raises(
        InputError, match=r"a, b, c: no head, so there is no label to answer\. Use .*`embed` or `route`"
    ):
        model.predict(rows)
    assert model.route(rows)[0].selected
    assert model.embed(rows).shape == (1, 32)


# Many heads


def test_heads_that_differ_in_the_names_of_their_labels_share_an_empty_shell(root, tmp_path, monkeypatch):
    _, base, bundle = shell_of(root, "bert")
    folder, built = bundle / "tasks" / "b" / "head", []
    monkeypatch.setattr(classify, "build", lambda *given: built.append(given) or build(*given))
    shells, heads = {}, []
    for number, labels in enumerate([["a", "b", "c"], ["x", "y", "z"], ["one", "two"]]):
        own = tmp_path / f"{number}"
        own.mkdir()
        config = json.loads((folder / "config.json").read_text())
        config |= {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
        (own / "config.json").write_text(json.dumps(config))
        weight = torch.randn(len(labels), 32)
        save_file({"classifier.weight": weight, "classifier.bias": torch.zeros(len(labels))}, own / "model.safetensors")
        heads.append((ShellHead(own, base, shells), weight))
    assert len(built) == 2  # of three labels, and of two
    inputs = FAMILIES["bert"].make_inputs(2)
    with torch.inference_mode():
        output = base(**inputs)
        output["pooler_output"] = torch.randn(2, 32)
    for head, weight in heads:
        assert head.labels_expected == len(weight)
        assert torch.allclose(head(output, inputs), output["pooler_output"] @ weight.mT, atol=1e-5)


def test_a_head_with_another_file_beside_it_has_a_shell_of_its_own(root, tmp_path):
    _, base, bundle = shell_of(root, "bert")
    shutil.copytree(bundle / "tasks" / "b" / "head", tmp_path / "head")
    (tmp_path / "head" / "generation_config.json").write_text("{}")
    shells = {}
    ShellHead(bundle / "tasks" / "b" / "head", base, shells)
    ShellHead(tmp_path / "head", base, shells)
    assert len(shells) == 2


def test_heads_of_one_kind_stay_apart_where_torch_fills_parameters_in_their_place(root):
    """As on devices whose tensors are of a class of their own."""
    bundle = family_bundle(root, "bert")
    base, shells = AutoModel.from_pretrained(bundle / "base").eval(), {}
    inputs = FAMILIES["bert"].make_inputs(3)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.inference_mode():
            output = base(**inputs)
        first, second = (ShellHead(bundle / "tasks" / "a" / "head", base, shells) for _ in range(2))
        second._tensors = {name: tensor + 1 for name, tensor in second._tensors.items()}
        alone = first(output, inputs)
        assert not torch.allclose(second(output, inputs), alone)
        assert torch.equal(first(output, inputs), alone)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
