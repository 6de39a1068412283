"""Folders of sentence-transformers: where the backbone lies, and what a head on it reads."""

import json

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch.nn.functional import normalize

import massmerge
from massmerge.checkpoints import find_source
from massmerge.errors import InputError
from models import open_pair
from pairs import BERT

KINDS = "sentence_transformers.models."
HEAD, DENSE = torch.randn(2, 32), torch.randn(6, 32)


def write_sentence(folder, model, *modules, inside="", pooling=None):
    """A model with modules behind it; `inside` is where its backbone lies."""
    model.save_pretrained(folder / inside)
    entries = [("Transformer", inside), ("Pooling", "1_Pooling"), *((m, f"{i}_{m}") for i, m in enumerate(modules, 2))]
    (folder / "modules.json").write_text(json.dumps([{"type": KINDS + kind, "path": path} for kind, path in entries]))
    for _, path in entries:
        (folder / path).mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_mean_tokens": True}))
    if "Dense" in modules:
        place = folder / f"{modules.index('Dense') + 2}_Dense"
        save_file({"linear.weight": DENSE}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps({"activation_function": "torch.nn.modules.activation.Tanh"}))


def write_recipe(folder, width=32, **head):
    save_file({"weight": torch.ones(2, width) if width != 32 else HEAD}, folder / "head.safetensors")
    task = {"name": "t", "expert": "expert", "head": {"weights": "head.safetensors", "labels": ["a", "b"], **head}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"base": "base", "tasks": [task]}))
    return folder / "recipe.yaml"


def logits(folder, **head):
    """What the merged bundle's head gives for two inputs, and the expert's hidden states for the same."""
    bundle = massmerge.merge(write_recipe(folder, **head), folder / "bundle", workers=1)
    model = massmerge.load(bundle)
    inputs = BERT.make_inputs(2)
    expert = BERT.base.from_pretrained(folder / "expert" / ("0_T" if (folder / "expert/0_T").is_dir() else ""))
    with torch.inference_mode():
        output = expert.eval()(**inputs)
        return model.core.heads["t"](output, inputs), output.last_hidden_state


def write_pair(folder, *modules, **options):
    base = BERT.make_base()
    base.save_pretrained(folder / "base")
    write_sentence(folder / "expert", BERT.make_expert(base, 0).bert, *modules, **options)


def test_the_backbone_is_read_where_modules_json_says(tmp_path):
    base = BERT.make_base()
    write_sentence(tmp_path / "base", base, inside="0_T")
    write_sentence(tmp_path / "expert", BERT.make_expert(base, 0).bert, inside="0_T")
    opened, expert = open_pair(tmp_path)
    assert opened.read("embeddings.word_embeddings.weight").equal(base.embeddings.word_embeddings.weight)
    assert expert.names() == set(opened.slots)
    watched = find_source("expert", tmp_path, download=False).files()
    assert {p.name for p in watched} >= {"modules.json", "model.safetensors", "config.json"}


@pytest.mark.parametrize(
    ("pooling", "read"),
    [
        ({"pooling_mode_mean_tokens": True}, lambda h: h.mean(1)),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, lambda h: h[:, 0]),
        ({"pooling_mode": "cls"}, lambda h: h[:, 0]),
    ],
    ids=["mean", "cls", "cls in a word"],
)
def test_a_head_reads_what_the_pooling_says(tmp_path, pooling, read):
    write_pair(tmp_path, pooling=pooling, inside="0_T")
    found, hidden = logits(tmp_path)
    torch.testing.assert_close(found, read(hidden) @ HEAD.T)


def test_normalised_and_dense_outputs_are_what_a_head_reads(tmp_path):
    write_pair(tmp_path, "Dense", "Normalize")
    found, hidden = logits(tmp_path, width=6)
    torch.testing.assert_close(found, normalize(torch.tanh(hidden.mean(1) @ DENSE.T)) @ torch.ones(6, 2))


def test_a_head_that_says_what_it_reads_reads_that(tmp_path):
    write_pair(tmp_path, "Normalize")
    found, hidden = logits(tmp_path, features="cls")
    torch.testing.assert_close(found, hidden[:, 0] @ HEAD.T)


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        ((), {"pooling_mode_max_tokens": True}, r"its pooling is max_tokens; supported: mean, cls\. Give `features:`"),
        (("LSTM",), None, r"a LSTM follows the pooling.*Give `features:`"),
    ],
    ids=["pooling", "module"],
)
def test_what_a_head_cannot_read_through_is_refused_with_the_remedy(tmp_path, modules, pooling, words):
    write_pair(tmp_path, *modules, pooling=pooling)
    with pytest.raises(InputError, match=words):
        massmerge.merge(write_recipe(tmp_path), tmp_path / "bundle")


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "n" * 5000], ids=["up", "root", "long"])
def test_modules_outside_of_the_folder_are_refused(tmp_path, path):
    write_pair(tmp_path)
    (tmp_path / "expert" / "modules.json").write_text(json.dumps([{"type": KINDS + "Transformer", "path": path}]))
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(InputError, match=r"modules\.json"):
        open_pair(tmp_path)
