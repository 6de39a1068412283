"""Small examples made on the spot, each with a recipe: a BERT, a T5 whose experts write, a CLIP with heads of texts.

The weights are random and the updates have the falling spectrum that fine-tuning gives; it shows the tool, not accuracy.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    CLIPVisionModel,
    T5Config,
    T5ForConditionalGeneration,
)

from massmerge.io.tensor_file import write_tensors

_WORDS = (
    "free win prize call now meeting report goal team match vote law party cell gene star film song bad good sad happy"
)

_SIZE = {
    "vocab_size": 2000,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
_LABELS = {
    "spam": ["ham", "spam"],
    "topic": ["politics", "sports", "science", "arts"],
    "mood": ["negative", "positive"],
}
_RECIPE = """\
base: base
tasks:
  - name: spam
    expert: spam
  - name: topic
    expert: topic
  - name: mood
    expert: mood             # a LoRA adapter, rank 8
    labels: [negative, positive]
merge:
  budget: 2.0                # at most twice the bytes of the base, heads not counted
"""
_WRITERS = ("question", "summary")
_LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789.,:"!_-'
CLIP_VOCABULARY = (*_LETTERS, *(f"{letter}</w>" for letter in _LETTERS), "<|startoftext|>", "<|endoftext|>")
_PICTURES = {"pets": ("oxford_pets", ["cat", "dog"]), "signs": ("gtsrb", ["stop", "yield", "no entry"])}


def make_example(folder: Path) -> Path:
    """Write the example to a folder; returns the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    seeds = torch.Generator().manual_seed(7)
    base = BertModel(BertConfig(**_SIZE))
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeds) * 0.05)
    base.save_pretrained(folder / "base")
    _write_tokenizer(folder / "base")
    for task in ("spam", "topic"):
        _write_full_expert(folder / task, base, _LABELS[task], seeds)
    _write_adapter(folder / "mood", base, seeds)
    recipe = folder / "recipe.yaml"
    recipe.write_text(_RECIPE, encoding="utf-8")
    return recipe


def make_writing_example(folder: Path) -> Path:
    """Write an example that generates, a T5 and two full experts, to a folder; returns the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    seeds = torch.Generator().manual_seed(7)
    config = T5Config(vocab_size=112, d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, pad_token_id=0,
                      eos_token_id=3, decoder_start_token_id=0)  # fmt: skip
    base = T5ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            # Scales near 1, and an embedding that differs from word to word: what is written then depends on the prompt.
            start = 1.0 if parameter.ndim == 1 else 0.0
            size = 1.0 if name == "shared.weight" else 0.3
            parameter.copy_(start + torch.randn(parameter.shape, generator=seeds) * size)
    base.save_pretrained(folder / "base")
    _write_tokenizer(folder / "base", model_input_names=["input_ids", "attention_mask"])
    for task in _WRITERS:
        expert = T5ForConditionalGeneration(config)
        with torch.no_grad():
            for name, parameter in expert.named_parameters():
                parameter.copy_(base.get_parameter(name) + _update(parameter.shape, seeds))
        expert.save_pretrained(folder / task)
    tasks = "".join(f"  - name: {task}\n    expert: {task}\n" for task in _WRITERS)
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"base: base\ntasks:\n{tasks}", encoding="utf-8")
    return recipe


def make_clip_example(folder: Path) -> Path:
    """Write a CLIP with both towers and two fine-tuned vision towers to a folder; returns the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    seeds = torch.Generator().manual_seed(7)
    tower = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    words = len(CLIP_VOCABULARY)
    text = {"vocab_size": words, "bos_token_id": words - 2, "eos_token_id": words - 1, "pad_token_id": words - 1}
    vision = {**tower, "image_size": 32, "patch_size": 8}
    base = CLIPModel(CLIPConfig(vision_config=vision, text_config={**tower, **text}, projection_dim=32))
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=seeds) * 0.15)
    base.save_pretrained(folder / "base")
    write_clip_processor(folder / "base")
    tasks = ""
    for task, (templates, classes) in _PICTURES.items():
        expert = CLIPVisionModel(base.config.vision_config)
        with torch.no_grad():
            for name, parameter in expert.named_parameters():
                change = _update(parameter.flatten(1).shape if parameter.ndim > 1 else parameter.shape, seeds)
                parameter.copy_(base.vision_model.get_parameter(name) + change.reshape(parameter.shape))
        expert.save_pretrained(folder / task)
        tasks += f"  - name: {task}\n    expert: {task}\n"
        tasks += f"    head: {{classes: [{', '.join(classes)}], templates: {templates}}}\n"
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"base: base\ntasks:\n{tasks}", encoding="utf-8")
    return recipe


def write_clip_processor(folder: Path) -> None:
    """A tokenizer of letters and a processor for small images, of CLIP's classes."""
    vocabulary = {token: i for i, token in enumerate(CLIP_VOCABULARY)}
    end = CLIP_VOCABULARY[-1]
    CLIPTokenizer(vocab=vocabulary, merges=[], unk_token=end, eos_token=end, pad_token=end).save_pretrained(folder)
    size = {"height": 32, "width": 32}
    CLIPImageProcessorPil(size=size, crop_size=size).save_pretrained(folder)


def _write_tokenizer(folder: Path, **options: object) -> None:
    """A tokenizer of letters, letter pairs and a few words, so that any English text has tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS.split(), *letters, *(f"##{c}" for c in letters)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=512, **options).save_pretrained(folder)


def _update(shape: torch.Size, seeds: torch.Generator) -> Tensor:
    """A change whose singular values fall off, as those of fine-tuning do."""
    if len(shape) < 2:
        return torch.randn(shape, generator=seeds) * 0.01
    rank = min(shape)
    left = torch.linalg.qr(torch.randn(shape[0], rank, generator=seeds)).Q
    right = torch.linalg.qr(torch.randn(shape[1], rank, generator=seeds)).Q
    return (left * torch.exp(-torch.arange(rank) / 6.0)) @ right.mT


@torch.no_grad()
def _write_full_expert(folder: Path, base: BertModel, labels: list[str], seeds: torch.Generator) -> None:
    config = BertConfig(**_SIZE, id2label=dict(enumerate(labels)), label2id={n: i for i, n in enumerate(labels)})
    expert = BertForSequenceClassification(config)
    for name, parameter in expert.bert.named_parameters():
        parameter.copy_(base.get_parameter(name) + _update(parameter.shape, seeds))
    for parameter in expert.classifier.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=seeds) * 0.05)
    expert.save_pretrained(folder)


def _write_adapter(folder: Path, base: BertModel, seeds: torch.Generator) -> None:
    folder.mkdir(exist_ok=True)
    width, rank = _SIZE["hidden_size"], 8
    tensors = {
        "base_model.model.classifier.weight": torch.randn(2, width, generator=seeds) * 0.05,
        "base_model.model.classifier.bias": torch.zeros(2),
    }
    for name, _ in base.named_parameters():
        if name.endswith(("query.weight", "value.weight")):
            module = f"base_model.model.bert.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, width, generator=seeds) * 0.1
            tensors[f"{module}.lora_B.weight"] = torch.randn(width, rank, generator=seeds) * 0.1
    write_tensors(folder / "adapter_model.safetensors", tensors)
    config = {
        "peft_type": "LORA", "task_type": "SEQ_CLS", "r": rank, "lora_alpha": 16, "target_modules": ["query", "value"],
        "modules_to_save": ["classifier"], "base_model_name_or_path": "base",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
