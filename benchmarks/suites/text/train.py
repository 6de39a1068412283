"""Experts of the text suite: a linear head is fitted on frozen features and frozen, then the backbone is fine-tuned.

The head reads the mean over real tokens, which is what this base was trained to give. The library's own class for BERT
reads the first token instead, so an expert is a `BertModel` folder with its head beside it: `head.safetensors` and
`labels.json`, as `head:` of a recipe takes them.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from benchmarks.suites.lora import add_adapter, save_adapter
from benchmarks.suites.splits import SPLITS, read_split
from benchmarks.suites.text import backbone
from benchmarks.suites.text.tasks import TASKS, prepare
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

Kind = Literal["full", "lora"]
FOLDERS: dict[Kind, str] = {"full": "experts", "lora": "experts_lora"}


@dataclass(frozen=True)
class Protocol:
    """How an expert is fine-tuned."""

    kind: Kind = "full"
    samples: int = 4000
    rate: float = 5e-5
    batch: int = 32
    weight_decay: float = 0.1
    warmup: float = 0.1
    clip: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Encoded:
    """A split as token numbers and label numbers."""

    tokens: list[list[int]]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


def protocol(task: str, kind: Kind, quick: bool = False) -> Protocol:
    """The protocol of a task: adapters start from nothing and take larger steps."""
    samples = 640 if quick else TASKS[task].samples
    return Protocol(kind, samples, rate=5e-5 if kind == "full" else 1e-3, weight_decay=0.1 if kind == "full" else 0.0)


def expert_folder(task: str, kind: Kind) -> Path:
    """Where a task's expert lies."""
    return backbone.folder() / FOLDERS[kind] / task


def train_expert(task: str, how: Protocol) -> dict[str, Any]:
    """Make a task's expert, unless it is there already; returns what its `metrics.json` says."""
    target = expert_folder(task, how.kind)
    if (target / "metrics.json").is_file():
        return json.loads((target / "metrics.json").read_text(encoding="utf-8"))
    base = backbone.base()
    tokenizer = AutoTokenizer.from_pretrained(base)
    data = prepare(task)
    names: list[str] = json.loads((data / "data.json").read_text(encoding="utf-8"))["classes"]
    train, validation, test = (_encode(data, part, tokenizer, names) for part in SPLITS)
    model = AutoModel.from_pretrained(base, attn_implementation="sdpa")
    began = time.perf_counter()
    head = fit_head(features(model, train), train.labels, features(model, validation), validation.labels, len(names))
    frozen = {"validation": accuracy(model, head, validation), "test": accuracy(model, head, test)}
    tuned: Any = add_adapter(model) if how.kind == "lora" else model
    finetune(tuned, head, train, how, task)
    metrics = {
        "task": task,
        "frozen": frozen,
        "finetuned": {"validation": accuracy(tuned, head, validation), "test": accuracy(tuned, head, test)},
        "seconds": round(time.perf_counter() - began, 1),
        "classes": len(names),
        "protocol": asdict(how),
    }
    _save(target, tuned, head, names, tokenizer, metrics)
    return metrics


def features(model: PreTrainedModel, data: Encoded) -> Tensor:
    """Mean over real tokens of the last layer, (rows, width)."""
    model.eval()
    result = torch.empty(len(data), model.config.hidden_size)
    with torch.inference_mode():
        for rows in _by_length(data, 64):
            result[rows] = pooled(model, data, rows)
    return result


def pooled(model: nn.Module, data: Encoded, rows: Sequence[int]) -> Tensor:
    """What the head reads of some rows."""
    longest = max(len(data.tokens[row]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        tokens = data.tokens[row]
        ids[place, : len(tokens)] = torch.tensor(tokens)
        mask[place, : len(tokens)] = 1
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def fit_head(x: Tensor, labels: Tensor, x_held: Tensor, held: Tensor, classes: int) -> nn.Linear:
    """Multinomial logistic regression on features; of several strengths of its penalty, the best on the held-out rows."""
    best, score = None, -1.0
    for penalty in (1e-4, 1e-3, 1e-2):
        head = _logistic(x, labels, classes, penalty)
        with torch.inference_mode():
            found = float((head(x_held).argmax(1) == held).float().mean())
        if found > score:
            best, score = head, found
    assert best is not None
    return best.requires_grad_(False)


def _logistic(x: Tensor, labels: Tensor, classes: int, penalty: float) -> nn.Linear:
    head = nn.Linear(x.shape[1], classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    x = x.clone()  # made under inference mode, which autograd refuses
    optimizer = torch.optim.LBFGS(
        head.parameters(), lr=1.0, max_iter=200, history_size=20, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(head(x), labels) + penalty * head.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return head


def accuracy(model: PreTrainedModel, head: nn.Linear, data: Encoded) -> float:
    """Share of rows whose highest logit is their label's."""
    with torch.inference_mode():
        return round(float((head(features(model, data)).argmax(1) == data.labels).float().mean()), 4)


def finetune(model: nn.Module, head: nn.Linear, train: Encoded, how: Protocol, name: str) -> None:
    """Fine-tune all weights that want a gradient; the head stays as it is."""
    torch.manual_seed(how.seed)
    weights = [p for p in model.parameters() if p.requires_grad]
    steps = math.ceil(how.samples / how.batch)
    optimizer = torch.optim.AdamW(weights, lr=how.rate, weight_decay=how.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _cosine(step, steps, how.warmup))
    model.train()
    bar = tqdm(_stream(train, how.batch, steps, how.seed), total=steps, desc=f"{name} ({how.kind})", mininterval=5)
    for rows in bar:
        loss = nn.functional.cross_entropy(head(pooled(model, train, rows)), train.labels[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(weights, how.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    model.eval()


def _cosine(step: int, steps: int, warmup: float) -> float:
    """Share of the learning rate: a linear rise, then half a cosine down to nothing."""
    rise = max(1, round(steps * warmup))
    return (step + 1) / rise if step < rise else 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _stream(data: Encoded, size: int, steps: int, seed: int) -> Iterator[list[int]]:
    """Batches of rows of like length, epoch after epoch, in random order: little of the work is spent on padding."""
    random = np.random.default_rng(seed)
    given = 0
    while given < steps:
        order = random.permutation(len(data))
        batches = []
        for start in range(0, len(order), size * 16):
            chunk = sorted(order[start : start + size * 16].tolist(), key=lambda row: len(data.tokens[row]))
            batches += [chunk[i : i + size] for i in range(0, len(chunk), size)]
        for batch in random.permutation(len(batches))[: steps - given]:
            yield batches[batch]
            given += 1


def _by_length(data: Encoded, size: int) -> Iterator[list[int]]:
    order = sorted(range(len(data)), key=lambda row: len(data.tokens[row]))
    yield from (order[start : start + size] for start in range(0, len(order), size))


def _encode(folder: Path, part: str, tokenizer: Any, names: list[str]) -> Encoded:
    texts, labels = read_split(folder, part, "text")
    tokens = tokenizer(texts, truncation=True, max_length=tokenizer.model_max_length)["input_ids"]
    number = {name: i for i, name in enumerate(names)}
    return Encoded(tokens, torch.tensor([number[label] for label in labels]))


def _save(target: Path, model: Any, head: nn.Linear, names: list[str], tokenizer: Any, metrics: dict[str, Any]) -> None:
    """Write an expert; the folder appears when it is complete."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if metrics["protocol"]["kind"] == "lora":
        save_adapter(model, partial, backbone.HUB)
    else:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    save_file({"weight": head.weight.data.contiguous(), "bias": head.bias.data}, partial / "head.safetensors")
    (partial / "labels.json").write_text(json.dumps(names, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (partial / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
