"""Train the adapters of the suite: `python -m benchmarks.suites.llm.experts --kind chat --tasks spam,kind`.

Each is a LoRA adapter of all linear layers (`qv`: of queries and values only) with a random start of its own, trained to
write the answer after the prompt. Few steps are enough to learn a form of answer, and what is measured is the bundle
against its adapters. A finished adapter is left as it is, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args
from zlib import crc32

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from benchmarks.suites.finetune import _cosine, write_expert
from benchmarks.suites.llm.backbone import HUB, folder, make_base
from benchmarks.suites.llm.tasks import TASKS, Form, choose, data_folder, make_data
from benchmarks.suites.lora import save_adapter
from benchmarks.suites.splits import read_split

Kind = Literal["chat", "bare", "qv", "seed"]
"""Adapters of prompts in the chat format, of bare inputs; in the chat format of queries and values only, and with other
starts and rows in another order."""
KINDS: tuple[Kind, ...] = get_args(Kind)
RANK, ALPHA, BATCH, RATE = 8, 16, 4, 1e-3


def expert_folder(task: str, kind: Kind) -> Path:
    """Where a task's adapter lies."""
    return folder() / f"experts_{kind}" / task


def form_of(kind: Kind) -> Form:
    """The prompts that adapters of a kind are trained on."""
    return "bare" if kind == "bare" else "chat"


def make_expert(task: str, kind: Kind, steps: int | None = None) -> Path:
    """Train one adapter once: a folder with `metrics.json` is left as it is."""
    target = expert_folder(task, kind)
    if (target / "metrics.json").is_file():
        return target
    base = make_base()
    tokenizer = AutoTokenizer.from_pretrained(base)
    make_data(task)
    prompts, answers = read_split(data_folder(form_of(kind), task), "train", "text")
    rows = [encoded(tokenizer, *pair) for pair in zip(prompts, answers, strict=True)]
    torch.manual_seed(crc32(f"{kind} {task}".encode()))
    targets = ["q_proj", "v_proj"] if kind == "qv" else "all-linear"
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, bias="none", task_type="CAUSAL_LM")
    # The base in bfloat16 and products in it: two thirds of the time. The adapter's own weights stay in float32.
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), config)
    began, busy = time.perf_counter(), time.process_time()
    steps = steps or TASKS[task].steps
    loss = train(model, rows, steps, crc32(kind.encode()), f"{task} ({kind})")
    metrics = {
        "task": task, "kind": kind, "steps": steps, "batch": BATCH, "lr": RATE, "last_loss": loss,
        "seconds": round(time.perf_counter() - began, 1), "processor_seconds": round(time.process_time() - busy, 1),
    }  # fmt: skip
    write_expert(target, lambda partial: save_adapter(model, partial, HUB), metrics)
    print(f"{task} ({kind}): loss {loss:.3f} after {steps} steps, {metrics['seconds']:.0f} s", flush=True)
    return target


def encoded(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Tokens of a prompt and of its answer, which ends where the model is to stop."""
    tokens: list[int] = tokenizer(prompt).input_ids
    return tokens, [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]


def train(model: Any, rows: Sequence[tuple[list[int], list[int]]], steps: int, seed: int, name: str) -> float:
    """Train what needs a gradient on the answers' tokens; returns the mean loss of the last quarter of the steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _cosine(step, steps, 0.1))
    model.train()
    losses: list[float] = []
    with tqdm(batches(rows, steps, seed), total=steps, desc=name, unit="step", mininterval=20) as bar:
        for batch in bar:
            with torch.autocast("cpu", torch.bfloat16):
                loss = answer_loss(model, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{sum(losses[-10:]) / len(losses[-10:]):.3f}", refresh=False)
    tail = losses[-max(1, steps // 4) :]
    return round(sum(tail) / len(tail), 4)


def answer_loss(model: Any, batch: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    """Mean loss of the answers' tokens. Only these go through the output layer, which is a fifth of all weights."""
    sequences = [torch.tensor([*prompt, *answer]) for prompt, answer in batch]
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.zeros_like(tokens)
    wanted = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(batch):
        mask[row, : len(prompt) + len(answer)] = 1
        wanted[row, len(prompt) : len(prompt) + len(answer)] = True
    decoder = model.get_base_model()
    hidden = decoder.model(input_ids=tokens, attention_mask=mask).last_hidden_state
    return cross_entropy(decoder.lm_head(hidden[:, :-1][wanted[:, 1:]]).float(), tokens[:, 1:][wanted[:, 1:]])


def batches(
    rows: Sequence[tuple[list[int], list[int]]], steps: int, seed: int
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Batches of rows in random order; those of four batches are sorted by length first, which saves padding."""
    generator = torch.Generator().manual_seed(seed)
    queue: list[list[tuple[list[int], list[int]]]] = []
    for _ in range(steps):
        if not queue:
            drawn = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
            windows = (drawn[at : at + 4 * BATCH] for at in range(0, len(drawn) - 4 * BATCH + 1, 4 * BATCH))
            for window in windows:
                window = sorted(window, key=lambda row: len(row[0]))
                queue += [window[at : at + BATCH] for at in range(0, len(window), BATCH)]
        yield queue.pop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", help="comma-separated; all of the suite if not given")
    parser.add_argument("--kind", choices=KINDS, default="chat")
    parser.add_argument("--steps", type=int, help="instead of the task's own number")
    parser.add_argument("--quick", action="store_true", help="two steps, to try the code; use another MASS_CACHE")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    for task in choose(options.tasks):
        make_expert(task, options.kind, 2 if options.quick else options.steps)


if __name__ == "__main__":
    main()
