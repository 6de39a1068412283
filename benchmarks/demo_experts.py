"""Makes what `mass demo` carries from experts of the text suite: `python -m benchmarks.demo_experts [--measure]`.

A full fine-tune's change of each matrix is cut by SVD to a low rank and saved as peft saves a LoRA adapter; biases and
LayerNorms, which have no rank to cut, are saved whole. Beside the adapters: heads, labels, some rows of the test splits
drawn by a seed, the recipe, the suite, and where all of it comes from. Only tasks whose data may be passed on are taken.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertModel
from transformers.utils import logging

from benchmarks.suites.finetune import Rows, frozen_features
from benchmarks.suites.lora import TARGETS, save_adapter
from benchmarks.suites.splits import read_split
from benchmarks.suites.text.backbone import HUB, folder, make_base
from benchmarks.suites.text.experts import expert_folder, load_rows, mean_token
from massmerge.errors import InputError

OUT = Path(__file__).parents[1] / "src" / "massmerge" / "demo" / "data"
NOTICES = Path(__file__).parent / "demo_notices.md"
TASKS = ("sms_spam", "products", "glosses", "newsgroups", "imdb")
FREE = {*TASKS, "verb_glosses"}
"""Tasks whose rows the repository may carry; `demo_notices.md` has their licences."""
RANKS = (8, 16, 32)
RANK = 16
ROWS = 60
INPUTS = 16
MOST_BYTES = 20_000_000
SPLITS = ("validation", "test")


@dataclass(frozen=True)
class Expert:
    """A full fine-tune of the text suite."""

    task: str
    model: BertModel
    head: nn.Linear
    labels: list[str]

    @classmethod
    def load(cls, task: str) -> Expert:
        """The expert that the suite has made."""
        place = expert_folder(task, "full")
        if not (place / "metrics.json").is_file():
            raise InputError(f"{task}: no expert in {place}. Run `make suite-text` first.")
        labels: list[str] = json.loads((place / "labels.json").read_text(encoding="utf-8"))
        found = load_file(place / "head.safetensors")
        head = nn.Linear(found["weight"].shape[1], len(labels))
        head.load_state_dict(found)
        return cls(task, AutoModel.from_pretrained(place).eval(), head, labels)


# The adapter


def cut(delta: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best product `b (m, rank) @ a (rank, n)` for a matrix (m, n); both have the same norm, which suits float16."""
    u, s, v = torch.linalg.svd(delta, full_matrices=False)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * v[:rank]


def make_adapter(expert: BertModel, rank: int) -> PeftModel:
    """The base with an adapter that stands for the expert."""
    base = AutoModel.from_pretrained(make_base())
    changed = dict(expert.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    config = LoraConfig(
        r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=TARGETS, bias="all", modules_to_save=["LayerNorm"]
    )
    model = get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = plain_name(name)
            if ".lora_A." in name:
                weight = plain.replace(".lora_A", "")
                b, a = cut(changed[weight].detach() - before[weight], rank)
                # The file has 16 bits, so what is measured here has too.
                parameter.copy_(a.half().float())
                model.get_parameter(name.replace("lora_A", "lora_B")).copy_(b.half().float())
            elif ".modules_to_save." in name or (plain.endswith(".bias") and ".original_module." not in name):
                parameter.copy_(changed[plain])
    return model


def plain_name(name: str) -> str:
    """A parameter's name in the model that peft has wrapped."""
    for part in (".default", ".base_layer", ".modules_to_save", ".original_module"):
        name = name.replace(part, "")
    return name.removeprefix("base_model.model.")


def write_adapter(model: PeftModel, expert: Expert, target: Path) -> None:
    """The adapter's folder with head and labels: 16 bits for the two thin matrices, 32 for what is saved whole."""
    save_adapter(model, target, HUB)
    path = target / "adapter_model.safetensors"
    # What peft keeps of replaced modules belongs to the base.
    tensors = {n: t for n, t in load_file(path).items() if ".original_module." not in n}
    halved = {n: t.half() if ".lora_" in n else t for n, t in tensors.items()}
    save_file({n: t.contiguous() for n, t in sorted(halved.items())}, path, {"format": "pt"})
    save_file({"weight": expert.head.weight.data, "bias": expert.head.bias.data}, target / "head.safetensors")
    write_json(target / "labels.json", expert.labels)


# What it gives


def answers(model: Any, head: nn.Linear, rows: Rows) -> Tensor:
    """The label of every row (n)."""

    def features(batch: dict[str, Tensor]) -> Tensor:
        return mean_token(model(**batch).last_hidden_state, batch["attention_mask"])

    with torch.no_grad():
        return head(frozen_features(features, rows)).argmax(1)


def compare(expert: Expert, ranks: Sequence[int], splits: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Accuracy of the expert and of its adapters on some splits, and how often they give the expert's answer."""
    data = folder() / "data" / expert.task
    tokenizer = AutoTokenizer.from_pretrained(make_base())
    adapters = {rank: make_adapter(expert.model, rank) for rank in ranks}
    found: dict[str, dict[str, Any]] = {}
    for split in splits:
        rows = load_rows(data, split, tokenizer, expert.labels)
        own = answers(expert.model, expert.head, rows)
        found[split] = {"rows": len(rows), "expert": share(own == rows.labels)}
        for rank, adapter in adapters.items():
            given = answers(adapter, expert.head, rows)
            found[split][f"rank {rank}"] = {"accuracy": share(given == rows.labels), "same_answer": share(given == own)}
    return found


def share(right: Tensor) -> float:
    """The share of rows that are right."""
    return round(float(right.float().mean()), 4)


# What is carried beside the adapters


def draw_rows(task: str, split: str, count: int, seed: int, tokenizer: Any) -> list[dict[str, str]]:
    """Rows of a split, drawn at random, each cut to the tokens that the experts read.

    E-mail addresses are taken out: people who wrote to a news group long ago need not be met here.
    """
    texts, labels = read_split(folder() / "data" / task, split, "text")
    chosen = sorted(np.random.default_rng(seed).permutation(len(texts))[:count])
    plain = [re.sub(r"\S+@\S+", "", texts[i]) for i in chosen]
    return [{"text": cut_text(text, tokenizer), "label": labels[i]} for i, text in zip(chosen, plain, strict=True)]


def cut_text(text: str, tokenizer: Any) -> str:
    """The beginning of a text that fits into the model, up to the end of a word."""
    kept = tokenizer.model_max_length - 2  # the first and the last token are marks
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    words = found.word_ids()
    if len(words) <= kept:
        return text
    while words[kept] == words[kept - 1]:  # the middle of a word
        kept -= 1
    return text[: found["offset_mapping"][kept - 1][1]]


def recipe(tasks: Sequence[str]) -> dict[str, Any]:
    """The recipe with defaults only."""
    heads = {t: {"weights": f"experts/{t}/head.safetensors", "labels": f"experts/{t}/labels.json", "features": "mean"}
             for t in tasks}  # fmt: skip
    return {"base": "base", "tasks": [{"name": t, "expert": f"experts/{t}", "head": heads[t]} for t in tasks]}


def suite(tasks: Sequence[str]) -> dict[str, Any]:
    """The suite. It has no references: the demo measures the experts on the same rows."""
    return {"name": "demo", "tasks": {t: {"data": f"rows/{t}.jsonl", "input": "text", "label": "label"} for t in tasks}}


def write_json(path: Path, data: Any) -> None:
    """Data as JSON for people."""
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    """Rows as JSON, one a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def build(tasks: Sequence[str], rank: int, rows: int, seed: int, out: Path) -> None:
    """Write everything anew."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name in ("rows", "inputs"):
        (partial / name).mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(make_base())
    about: dict[str, Any] = {"base": HUB, "rank": rank, "seed": seed, "tasks": {}}
    for task in tasks:
        expert = Expert.load(task)
        write_adapter(make_adapter(expert.model, rank), expert, partial / "experts" / task)
        drawn = draw_rows(task, "test", rows, seed, tokenizer)
        write_lines(partial / "rows" / f"{task}.jsonl", drawn)
        # For `mass calibrate`, which needs no labels.
        some = draw_rows(task, "train", INPUTS, seed, tokenizer)
        write_lines(partial / "inputs" / f"{task}.jsonl", [{"text": row["text"]} for row in some])
        source = json.loads((folder() / "data" / task / "data.json").read_text(encoding="utf-8"))
        about["tasks"][task] = {
            "source": source["source"]["from"], "licence": source["licence"], "rows": len(drawn),
            **compare(expert, [rank], SPLITS),
        }  # fmt: skip
        print(task, json.dumps(about["tasks"][task]["validation"]), flush=True)
    for name, content in (("recipe.yaml", recipe(tasks)), ("suite.yaml", suite(tasks))):
        (partial / name).write_text(yaml.safe_dump(content, sort_keys=False, width=120), encoding="utf-8")
    write_json(partial / "about.json", about)
    shutil.copyfile(NOTICES, partial / "LICENCES.md")
    size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise InputError(f"{size / 1e6:.1f} MB in {partial}; the demo carries at most {MOST_BYTES / 1e6:.0f} MB.")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    print(f"{out}: {size / 1e6:.1f} MB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--rows", type=int, default=ROWS, help="test rows of each task to carry")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of rows")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--measure", action="store_true", help="only print what each rank keeps; write nothing")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    tasks = [task.strip() for task in options.tasks.split(",") if task.strip()]
    unfree = [task for task in tasks if task not in FREE]
    if unfree:
        raise InputError(f"{', '.join(unfree)}: the data may not be passed on. There are {', '.join(sorted(FREE))}.")
    if not options.measure:
        build(tasks, options.rank, options.rows, options.seed, options.out)
        return
    for task in tasks:
        for split, found in compare(Expert.load(task), RANKS, ["validation"]).items():
            print(task, split, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
