"""Fine-tune the text suite's experts: `python -m benchmarks.suites.text.experts --tasks imdb,glosses [--kind lora]`.

The head reads the mean over real tokens, which is what this base was trained to give. The library's own class for BERT
reads the first token instead, so an expert is a `BertModel` folder (or an adapter) with its head beside it:
`head.safetensors` and `labels.json`, as `head:` of a recipe takes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from benchmarks.suites.finetune import Config, Rows, changed, expert_parser, finetune, summary, write_expert
from benchmarks.suites.lora import add_adapter, save_adapter
from benchmarks.suites.splits import SPLITS, read_split
from benchmarks.suites.text.backbone import BASES, HUB, folder, make_base
from benchmarks.suites.text.tasks import choose, make_data

Kind = Literal["full", "lora", "lora_same_start", "seed1", "seed2"]
"""Full fine-tunes; adapters with starts of their own or one for all; full fine-tunes with rows in other orders."""
SEEDS: dict[Kind, int] = {"seed1": 1, "seed2": 2}
FOLDERS: dict[Kind, str] = {kind: f"experts_{kind}" for kind in get_args(Kind)} | {"full": "experts"}
QUICK_ROWS = {"train": 256, "validation": 64, "test": 64}


def expert_folder(task: str, kind: Kind, suite: str = "text") -> Path:
    """Where a task's expert lies."""
    return folder(suite) / FOLDERS[kind] / task


def default_config(kind: Kind, suite: str = "text") -> Config:
    """The protocol of a kind. Adapters start from nothing, so they take larger steps and are not pulled back to zero.

    The larger base takes smaller steps, as is usual. In bfloat16 its products take a quarter of the time.
    """
    if suite == "mpnet":
        return Config(samples=2400, lr=5e-5, bfloat16=True)
    if kind.startswith("lora"):
        return Config(samples=1600, lr=1e-3, weight_decay=0.0)
    return Config(samples=2400, lr=2e-4, seed=SEEDS.get(kind, 0))


def make_expert(task: str, kind: Kind, config: Config, quick: bool = False, suite: str = "text") -> Path:
    """Fine-tune one task's expert once: a folder with `metrics.json` is left as it is."""
    target = expert_folder(task, kind, suite)
    if (target / "metrics.json").is_file():
        return target
    base, data = make_base(suite), make_data(task)
    tokenizer = AutoTokenizer.from_pretrained(base)
    classes: list[str] = json.loads((data / "data.json").read_text(encoding="utf-8"))["classes"]
    train, validation, test = (
        load_rows(data, split, tokenizer, classes, QUICK_ROWS[split] if quick else None) for split in SPLITS
    )
    model: Any = AutoModel.from_pretrained(base)
    if kind.startswith("lora"):
        model = add_adapter(model, start=crc32(task.encode()) if kind == "lora" else 0)
    head = nn.Linear(model.config.hidden_size, len(classes))

    def features(batch: dict[str, Tensor]) -> Tensor:
        return mean_token(model(**batch).last_hidden_state, batch["attention_mask"])

    metrics = finetune(model, features, head, train, validation, test, config, f"{task} ({kind})")

    def save(partial: Path) -> None:
        if kind.startswith("lora"):
            save_adapter(model, partial, HUB)
        else:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        save_file({"weight": head.weight.data.contiguous(), "bias": head.bias.data}, partial / "head.safetensors")
        (partial / "labels.json").write_text(json.dumps(classes, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    write_expert(target, save, {**metrics, "task": task, "kind": kind, "quick": quick})
    print(summary(f"{task} ({kind})", metrics), flush=True)
    return target


def mean_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean over real tokens of hidden states (b, tokens, d)."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def load_rows(data: Path, split: str, tokenizer: Any, classes: list[str], most: int | None = None) -> Rows:
    """The rows of a split as tokens and numbers of classes; the first of them if `most` is given."""
    texts, labels = read_split(data, split, "text")
    encoded = tokenizer(texts[:most], truncation=True, max_length=tokenizer.model_max_length)["input_ids"]
    padding = tokenizer.pad_token_id
    numbers = torch.tensor([classes.index(label) for label in labels[:most]])

    def collate(tokens: list[list[int]]) -> dict[str, Tensor]:
        padded = nn.utils.rnn.pad_sequence([torch.tensor(t) for t in tokens], batch_first=True, padding_value=padding)
        lengths = torch.tensor([len(t) for t in tokens])
        return {"input_ids": padded, "attention_mask": (torch.arange(padded.shape[1]) < lengths[:, None]).long()}

    return Rows(encoded, numbers, collate, [len(tokens) for tokens in encoded])


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = expert_parser(__doc__)
    parser.add_argument(
        "--kind",
        choices=FOLDERS,
        default="full",
        help="adapters have rank 8, and starts of their own or one for all",
    )
    parser.add_argument("--suite", choices=list(BASES), default="text", help="which base is fine-tuned")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    config = changed(default_config(options.kind, options.suite), options)
    for task in choose(options.tasks):
        make_expert(task, options.kind, config, options.quick, options.suite)


if __name__ == "__main__":
    main()
