"""Tiny models of the real classes, with experts made by shifting their weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as tf
import yaml
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

import massmerge
from massmerge.bundle.manifest import read_manifest, write_manifest
from massmerge.checkpoints import Base, Expert, find_source, is_adapter, narrow, open_base, open_expert
from massmerge.checkpoints.experts import task_model
from massmerge.cli.demo.example import make_example
from naive import tsv_merge

_SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_IMAGE = {"image_size": 32, "patch_size": 8}


@dataclass(frozen=True)
class Family:
    """An architecture: its configuration, the class of the base and the class of an expert with a head."""

    name: str
    config: type
    options: dict
    base: type
    expert: type
    text: bool = True

    def make_config(self, labels: int = 2, **changes) -> tf.PretrainedConfig:
        return self.config(**{**self.options, "num_labels": labels, **changes})

    def make_base(self, **changes) -> tf.PreTrainedModel:
        torch.manual_seed(1)
        return self.base(self.make_config(**changes)).eval()

    def make_expert(
        self, base: tf.PreTrainedModel, seed: int, labels: int = 2, scale: float = 0.02
    ) -> tf.PreTrainedModel:
        """A version of the base with every parameter shifted, and a head of its own."""
        torch.manual_seed(100 + seed)
        expert = self.expert(self.make_config(labels)).eval()
        inside = backbone_of(expert, self.base)
        state = {k: v for k, v in base.state_dict().items() if k in inside.state_dict()}
        inside.load_state_dict(state, strict=False)
        with torch.no_grad():
            for parameter in expert.parameters():
                parameter.add_(torch.randn_like(parameter) * scale)
        return expert

    def make_inputs(self, count: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        if not self.text:
            side = self.make_config().image_size if hasattr(self.make_config(), "image_size") else 32
            return {"pixel_values": torch.randn(count, 3, side, side, generator=generator)}
        ids = torch.randint(3, 60, (count, 7), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def backbone_of(model: torch.nn.Module, kind: type) -> torch.nn.Module:
    """The part of a task's model that is of the base's class; the model itself if there is none."""
    return next((m for m in model.modules() if type(m) is kind), model)


_BERT = {"vocab_size": 60, **_SIZE, "max_position_embeddings": 40}
FAMILIES = {
    family.name: family
    for family in (
        Family("bert", tf.BertConfig, _BERT, tf.BertModel, tf.BertForSequenceClassification),
        Family("roberta", tf.RobertaConfig, {**_BERT, **_TOKENS, "pad_token_id": 1}, tf.RobertaModel,
               tf.RobertaForSequenceClassification),
        Family("distilbert", tf.DistilBertConfig,
               {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 40},
               tf.DistilBertModel, tf.DistilBertForSequenceClassification),
        Family("modernbert", tf.ModernBertConfig,
               {"vocab_size": 60, **_SIZE, **_TOKENS, "cls_token_id": 1, "sep_token_id": 2, "max_position_embeddings": 64},
               tf.ModernBertModel, tf.ModernBertForSequenceClassification),
        Family("vit", tf.ViTConfig, {**_IMAGE, **_SIZE}, tf.ViTModel, tf.ViTForImageClassification, text=False),
        Family("dinov2", tf.Dinov2Config, {"image_size": 28, "patch_size": 14, **_SIZE}, tf.Dinov2Model,
               tf.Dinov2ForImageClassification, text=False),
        Family("clip", tf.CLIPVisionConfig, {**_IMAGE, **_SIZE}, tf.CLIPVisionModel, tf.CLIPVisionModel, text=False),
        Family("t5", tf.T5Config,
               {"vocab_size": 60, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2,
                "decoder_start_token_id": 0},
               tf.T5Model, tf.T5ForConditionalGeneration),
        Family("gpt2", tf.GPT2Config,
               {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 40, **_TOKENS},
               tf.GPT2Model, tf.GPT2ForSequenceClassification),
        Family("llama", tf.LlamaConfig, {"vocab_size": 60, **_SIZE, **_TOKENS}, tf.LlamaModel,
               tf.LlamaForSequenceClassification),
    )
}  # fmt: skip


def write_family(folder: Path, name: str, tasks: dict[str, int], **merge) -> Path:
    """A base, an expert for each task (name: number of labels) and a recipe, in a folder; returns the recipe's path."""
    family = FAMILIES[name]
    base = family.make_base()
    base.save_pretrained(folder / "base")
    for seed, (task, labels) in enumerate(tasks.items()):
        family.make_expert(base, seed, labels).save_pretrained(folder / task)
    return write_recipe(folder, list(tasks), **merge)


def write_recipe(folder: Path, tasks: list[str], base: str = "base", name: str = "recipe.yaml", **merge) -> Path:
    """A recipe whose experts are folders of the tasks' names; `router` goes to its own section."""
    router = merge.pop("router", None)
    data: dict = {"base": base, "tasks": [{"name": task, "expert": task} for task in tasks]}
    if merge:
        data["merge"] = merge
    if router:
        data["router"] = router
    (folder / name).write_text(yaml.safe_dump(data, sort_keys=False))
    return folder / name


def save_as(model: tf.PreTrainedModel, folder: Path, form: str = "safetensors") -> Path:
    """A model as a Hugging Face folder whose weights are of that form: safetensors or bin, whole or sharded."""
    model.save_pretrained(folder, max_shard_size="40KB" if form == "sharded safetensors" else "5GB")
    if not form.endswith("bin"):
        return folder
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if form == "bin":
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    names = sorted(state)
    shards = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, members in shards.items():
        torch.save({name: state[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change the state dict in a folder's weights."""
    path = folder / "model.safetensors"
    path = path if path.exists() else folder / "adapter_model.safetensors"
    state = change(load_file(path))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, {"format": "pt"})


def open_pair(folder: Path, expert: str = "expert", base: str = "base") -> tuple[Base, Expert]:
    """A base, narrowed to what the expert is a version of, and the expert."""
    source = find_source(expert, folder, download=False)
    opened = open_base(find_source(base, folder, download=False))
    if not is_adapter(source):
        opened = narrow(opened, task_model(source, opened).skeleton)
    return opened, open_expert(source, opened)


def weights_of(base: Base, expert: Expert) -> dict[str, torch.Tensor]:
    """The fine-tuned backbone under module names, as a merge reads it."""
    state = {name: base.read(name).float() for name in base.slots}
    for name in expert.names():
        state[name] = expert.read(name).value(state.get(name), base.skeleton.slots[name]).float()
    return state


def state_of(model: torch.nn.Module, kind: type) -> dict[str, torch.Tensor]:
    """The state dict of the backbone inside a task's model, in float32."""
    return {name: tensor.float() for name, tensor in backbone_of(model, kind).state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    """Every tensor that was found equals its namesake; the worst is named where one does not."""
    errors = {name: float((tensor - expected[name]).abs().max()) for name, tensor in found.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, f"{worst} is off by {errors[worst]}"


def read_deltas(folder: Path, name: str, tasks: list[str]) -> tuple[dict, dict[str, dict]]:
    """The base's tensors, and for each task its expert's deltas, both under module names; read by transformers alone."""
    family = FAMILIES[name]
    base = family.base.from_pretrained(folder / "base").state_dict()
    deltas = {}
    for task in tasks:
        inside = backbone_of(family.expert.from_pretrained(folder / task), family.base).state_dict()
        deltas[task] = {key: inside.get(key, value) - value for key, value in base.items()}
    return base, deltas


def write_shifted(folder: Path, name: str, base: tf.PreTrainedModel, shift: dict[str, torch.Tensor]) -> None:
    """An expert that is the base plus the given deltas, with a random head."""
    family = FAMILIES[name]
    torch.manual_seed(len(folder.name))
    expert = family.expert(base.config)
    state = {key: value + shift[key] if key in shift else value for key, value in base.state_dict().items()}
    backbone_of(expert, family.base).load_state_dict(state, strict=False)
    expert.save_pretrained(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def make_bundle(folder: Path, name: str, tasks: dict[str, int], **sections) -> Path:
    """A family's base and experts, merged; sections of the recipe (merge, router, answer, …) are given whole."""
    recipe = write_family(folder, name, tasks)
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), **sections}, sort_keys=False))
    massmerge.merge(recipe, folder / "bundle")
    return folder / "bundle"


def family_bundle(root: Path, name: str) -> Path:
    """A bundle of three tasks of a family, made once a run; its sources lie beside it."""
    folder = root / f"family-{name}"
    if not folder.exists():
        make_bundle(folder, name, {"a": 2, "b": 3, "c": 4}, merge={"rank": 8})
    return folder / "bundle"


def text_bundle(root: Path) -> Path:
    """A bundle of text tasks (spam, topic, mood) with a tokenizer, made once a run."""
    folder = root / "text"
    if not folder.exists():
        massmerge.merge(make_example(folder), folder / "bundle")
    return folder / "bundle"


def image_bundle(root: Path) -> Path:
    """A bundle of image tasks (a, b) with an image processor, made once a run."""
    folder = root / "image"
    if not folder.exists():
        (folder / "base").mkdir(parents=True)
        tf.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder / "base")
        make_bundle(folder, "vit", {"a": 2, "b": 3}, merge={"rank": 8})
    return folder / "bundle"


def with_options(bundle: Path, folder: Path, **sections) -> Path:
    """A copy of a bundle whose recipe has other options, in sections such as router and answer."""
    shutil.copytree(bundle, folder)
    path = folder / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    for section, options in sections.items():
        recipe[section] = {**recipe.get(section, {}), **options}
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    manifest = read_manifest(folder)
    write_manifest(folder, {k: v for k, v in manifest.items() if k not in ("files", "sha256")})
    return folder


def rows_of(inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """A batch as ready inputs, one by one."""
    count = len(next(iter(inputs.values())))
    return [{name: tensor[i] for name, tensor in inputs.items()} for i in range(count)]


def stored_triplet(file: dict[str, torch.Tensor], key: str) -> tuple[torch.Tensor, ...]:
    """`u`, `s` and `v` of a matrix in float64, one vector after the other where they have scales."""
    u, s, v = (file[f"{key}.{part}"].double() for part in "usv")
    if f"{key}.scale" in file:
        of_u, of_v = file[f"{key}.scale"].tolist()
        u = torch.stack([column * step for column, step in zip(u.unbind(1), of_u, strict=True)], 1)
        v = torch.stack([row * step for row, step in zip(v.unbind(0), of_v, strict=True)])
    return u, s, v


def dense_changes(bundle: Path, base: tf.PreTrainedModel, tasks: list[str], merge: Callable) -> dict:
    """What a set changes in the base, as dense tensors: merged factors, and the mean of everything else.

    Args:
        bundle: its files are read, by safetensors alone.
        base: gives the shapes and the values that tasks leave as they are.
        tasks: the set.
        merge: a dense merge of a list of triplets `(u, s, v)`.
    """
    files = [load_file(bundle / "tasks" / task / "factors.safetensors") for task in tasks]
    changes = {}
    for key, value in base.state_dict().items():
        found = [stored_triplet(f, key) for f in files if f"{key}.s" in f]
        if found:
            matrix = merge(found)
            owner = base.get_submodule(key.rpartition(".")[0])
            change = matrix.mT if isinstance(owner, Conv1D) else matrix.reshape(value.shape)
            changes[key] = (value.double() + change).float()
        elif any(key in f for f in files):
            changes[key] = torch.stack([f.get(key, value) for f in files]).mean(0)
    return changes


def dense_expert(bundle: Path, name: str, tasks: list[str], head: str, merge: Callable = tsv_merge):
    """The task's own model around the base with a dense merge of a set, in the family's class."""
    family = FAMILIES[name]
    base = family.base.from_pretrained(bundle.parent / "base").eval()
    model = family.expert.from_pretrained(bundle.parent / head).eval()
    inside = backbone_of(model, family.base)
    known = inside.state_dict().keys()
    inside.load_state_dict({k: v for k, v in base.state_dict().items() if k in known}, strict=False)
    changes = dense_changes(bundle, base, tasks, merge)
    inside.load_state_dict({k: v for k, v in changes.items() if k in known}, strict=False)
    return model


def logits_of(prediction: massmerge.Prediction) -> dict[tuple[str, str], float]:
    """Every logit that a prediction names, by task and label."""
    best = (prediction.task, prediction.label)
    return {best: prediction.logit} | {(a.task, a.label): a.logit for a in prediction.alternatives}
