"""Whether a DoRA adapter can enter a bundle as a full delta: how much of it a budget's ranks keep.

    python benchmarks/dora.py --steps 80

Trains a DoRA and a LoRA adapter of rank 8 on one task of the text suite (its base and data must be there), from the same
start and on the same batches. For each the update is formed, `expert - base`, and cut to ranks: the adapter's own, and those
that `budget: 2.0` leaves to one of 8 and of 20 tasks. Printed: the share of energy that is kept, and the share of test texts
whose answer is the adapter's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import peft
import torch
from pyarrow import parquet
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from massmerge.linalg.factors import truncated_svd

ROOT = Path.home() / ".cache" / "massmerge" / "suites" / "text"
RANK = 8
TARGETS = ["query", "key", "value", "dense"]


def read_rows(task: str, split: str, count: int) -> tuple[list[str], list[str]]:
    """Texts and labels, drawn once."""
    table = parquet.read_table(ROOT / "data" / task / f"{split}.parquet").to_pydict()
    order = torch.randperm(len(table["label"]), generator=torch.Generator().manual_seed(0))[:count].tolist()
    return [table["text"][i] for i in order], [str(table["label"][i]) for i in order]


def train(
    model: PreTrainedModel, tokenizer: object, rows: tuple[list[str], list[str]], *, dora: bool, steps: int
) -> object:
    """An adapter of the model, after some steps."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, use_dora=dora, task_type="SEQ_CLS")
    adapted = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)
    labels = sorted(set(rows[1]))
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(len(rows[0]), (16,), generator=draw).tolist()
        batch = _tokens(tokenizer, [rows[0][i] for i in chosen])
        loss = adapted(**batch, labels=torch.tensor([labels.index(rows[1][i]) for i in chosen])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted.eval()


def _tokens(tokenizer: object, texts: list[str]) -> dict[str, Tensor]:
    return tokenizer(texts, padding=True, truncation=True, max_length=48, return_tensors="pt")  # type: ignore[operator]


@torch.inference_mode()
def answers(model: PreTrainedModel, tokenizer: object, texts: list[str]) -> Tensor:
    """The label of each text."""
    return torch.cat(
        [model(**_tokens(tokenizer, texts[i : i + 32])).logits.argmax(1) for i in range(0, len(texts), 32)]
    )


def measure(base: dict[str, Tensor], merged: PreTrainedModel, tokenizer: object, texts: list[str]) -> dict[str, object]:
    """What ranks keep of the update, in energy and in answers."""
    wanted, state = answers(merged, tokenizer, texts), {n: t.clone() for n, t in merged.state_dict().items()}
    deltas = {n: state[n] - base[n] for n in base if n in state and state[n].ndim == 2 and not state[n].equal(base[n])}
    total = sum(float(d.square().sum()) for d in deltas.values())
    found: dict[str, object] = {"matrices": len(deltas)}
    for name, tasks in ((f"rank {RANK}", None), ("budget 2.0, 8 tasks", 8), ("budget 2.0, 20 tasks", 20)):
        kept, cut = 0.0, dict(state)
        for matrix, delta in deltas.items():
            m, n = delta.shape
            rank = RANK if tasks is None else max(1, round(m * n / ((m + n + 1) * tasks)))
            factors = truncated_svd(delta, rank)
            kept += float(factors.s.square().sum())
            cut[matrix] = base[matrix] + (factors.u * factors.s) @ factors.v
        merged.load_state_dict(cut)
        same = float((answers(merged, tokenizer, texts) == wanted).float().mean())
        found[name] = {"energy": round(kept / total, 4), "same answers": round(same, 4)}
    return found


def main() -> None:
    """Train both, and print what is kept of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="offensive")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rows", type=int, default=200)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "base")
    train_rows, (texts, truths) = read_rows(args.task, "train", 2000), read_rows(args.task, "test", args.rows)
    labels = sorted(set(train_rows[1]))
    for dora in (False, True):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(ROOT / "base", num_labels=len(labels))
        base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        adapted = train(model, tokenizer, train_rows, dora=dora, steps=args.steps)
        merged = adapted.merge_and_unload()  # type: ignore[attr-defined]
        right = [
            labels[i] == truth for i, truth in zip(answers(merged, tokenizer, texts).tolist(), truths, strict=True)
        ]
        base = {name: tensor for name, tensor in base.items() if not name.startswith("classifier")}
        found = {"adapter": "DoRA" if dora else "LoRA", "accuracy": sum(right) / len(right)}
        sys.stdout.write(json.dumps(found | measure(base, merged, tokenizer, texts)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
