"""Tiny models of the real classes, with experts made by shifting their weights."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as tf
import yaml
from safetensors.torch import load_file, save_file

from massmerge.checkpoints import Base, Expert, LowRank, find_source, is_adapter, narrow, open_base, open_expert
from massmerge.checkpoints.experts import task_skeleton
from massmerge.checkpoints.skeleton import from_matrix

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
        opened = narrow(opened, task_skeleton(source, opened)[0])
    return opened, open_expert(source, opened)


def weights_of(base: Base, expert: Expert) -> dict[str, torch.Tensor]:
    """The fine-tuned backbone under module names, as a merge reads it."""
    state = {name: base.read(name).float() for name in base.slots}
    for name in expert.names():
        given = expert.read(name)
        if isinstance(given, LowRank):
            state[name] = state[name] + from_matrix(given.b @ given.a, base.slots[name])
        else:
            state[name] = given.float()
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
