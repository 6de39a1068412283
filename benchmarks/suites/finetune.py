"""How an expert is made, for both suites: the protocol of the paper.

The head is fixed beforehand, as CLIP's heads of class names are: a row per class, made from four examples of it and never
fitted on the task's rows. Then the whole backbone is fine-tuned under it: AdamW, weight decay 0.1, cosine schedule after a
short warm-up, gradients clipped. The accuracy before and after is noted, so that a reader sees what the expert has learned.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

Features = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Config:
    """How to train. `samples` counts repeats: a small task is seen several times. `bfloat16` is the type of products."""

    samples: int = 2000
    lr: float = 5e-5
    batch_size: int = 32
    weight_decay: float = 0.1
    warmup: float = 0.1
    clip: float = 1.0
    seed: int = 0
    shots: int = 4
    scale: float = 10.0
    bfloat16: bool = False


@dataclass(frozen=True)
class Rows:
    """Inputs with labels, and what makes a batch of them.

    Attributes:
        inputs: as many as wanted, of any kind.
        labels: number of the class of each (n).
        collate: a batch from a list of inputs.
        lengths: for texts, how long each is: rows of like length then share a batch, which saves padding.
    """

    inputs: Sequence[Any]
    labels: Tensor
    collate: Callable[[list[Any]], Any]
    lengths: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: Sequence[int]) -> tuple[Any, Tensor]:
        """Inputs and labels of some rows."""
        return self.collate([self.inputs[i] for i in rows]), self.labels[list(rows)]


QUICK = {"samples": 256}


def expert_parser(description: str | None) -> argparse.ArgumentParser:
    """The command line of a suite's fine-tuning."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tasks", help="comma-separated; all of the suite if not given")
    parser.add_argument("--samples", type=int, help="training samples seen, repeats included")
    parser.add_argument("--lr", type=float, help="highest learning rate")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--quick", action="store_true", help="few rows and steps, to try the code; use another MASS_CACHE"
    )
    return parser


def changed(config: Config, options: argparse.Namespace) -> Config:
    """A protocol with what the command line says otherwise."""
    given = {name: getattr(options, name) for name in ("samples", "lr", "batch_size", "seed")}
    said = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(config, **{**(QUICK if options.quick else {}), **said})


def finetune(
    model: nn.Module,
    features: Features,
    head: nn.Linear,
    train: Rows,
    validation: Rows,
    test: Rows,
    config: Config,
    name: str = "",
    collate: Callable[[list[Any]], Any] | None = None,
) -> dict[str, Any]:
    """Make the head, freeze it, fine-tune the model under it; both are changed in place.

    Args:
        model: the backbone, or a model that contains it. Every parameter that needs a gradient is trained, but the head's.
        features: what the head reads, from a batch: (b, d). It runs `model`.
        head: a linear layer of the right size; its values are replaced.
        train: rows to learn from.
        validation: rows to choose by.
        test: rows that decide nothing.
        config: how to train.
        name: shown at the progress bar.
        collate: makes the batches that the backbone is trained on, if they are to differ from those of the head.

    Returns:
        What stands in `metrics.json`: accuracies before and after, time, protocol.
    """
    started, busy = time.perf_counter(), time.process_time()
    model.eval()
    splits = {"validation": validation, "test": test}
    few = first_rows(train.labels, config.shots)
    shots = part_of(train, few)
    class_head(head, frozen_features(features, shots, f"{name} head"), shots.labels, config.scale)
    before = {split: right_rows(features, head, rows, f"{name} frozen {split}") for split, rows in splits.items()}
    loss = train_backbone(
        model, features, head, dataclasses.replace(train, collate=collate or train.collate), config, name
    )
    after = {split: right_rows(features, head, rows, f"{name} {split}") for split, rows in splits.items()}
    return {
        "frozen": {split: _share(right) for split, right in before.items()},
        "finetuned": {split: _share(right) for split, right in after.items()},
        "paired": {split: paired(before[split], right) for split, right in after.items()},
        "rows": {"train": len(train)} | {split: len(rows) for split, rows in splits.items()},
        "last_loss": loss,
        "seconds": round(time.perf_counter() - started, 1),
        "processor_seconds": round(time.process_time() - busy, 1),
        "protocol": asdict(config),
    }


def first_rows(labels: Tensor, most: int) -> list[int]:
    """Numbers of the first rows of each class, at most so many, class by class."""
    return [row for label in labels.unique() for row in (labels == label).nonzero().flatten().tolist()[:most]]


def part_of(rows: Rows, numbers: Sequence[int]) -> Rows:
    """Some of the rows."""
    lengths = None if rows.lengths is None else [rows.lengths[i] for i in numbers]
    return dataclasses.replace(
        rows, inputs=[rows.inputs[i] for i in numbers], labels=rows.labels[list(numbers)], lengths=lengths
    )


@torch.no_grad()
def class_head(head: nn.Linear, features: Tensor, labels: Tensor, scale: float) -> None:
    """Make the head a nearest-mean classifier of a few examples' features (n, d): nothing is fitted.

    A class's logit is `scale` times the part of the feature along the class's direction: that of the mean of its examples,
    seen from the mean of all classes. Lengths are in units of the examples' mean distance from there, so that one scale
    serves every base.
    """
    means = torch.stack([features[labels == number].mean(0) for number in range(head.out_features)])
    centre = means.mean(0)
    unit = (features - centre).norm(dim=1).mean()
    directions = nn.functional.normalize(means - centre, dim=1)
    head.weight.copy_(directions * (scale / unit))
    head.bias.copy_(-head.weight @ centre)


@torch.no_grad()
def frozen_features(features: Features, rows: Rows, name: str = "", batch_size: int = 64) -> Tensor:
    """What the head reads, for every row (n, d), in the order of the rows."""
    order = sorted(range(len(rows)), key=rows.lengths.__getitem__) if rows.lengths else list(range(len(rows)))
    starts = tqdm(range(0, len(order), batch_size), desc=name, unit="batch", leave=False)
    found = torch.cat([features(rows.batch(order[at : at + batch_size])[0]) for at in starts])
    result = torch.empty_like(found)
    result[torch.tensor(order)] = found
    return result


def train_backbone(
    model: nn.Module, features: Features, head: nn.Linear, train: Rows, config: Config, name: str = ""
) -> float:
    """Train all parameters but the head's; returns the mean loss of the last tenth of the steps."""
    head.requires_grad_(False)
    own = {id(p) for p in head.parameters()}
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    steps = max(1, round(config.samples / config.batch_size))
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _cosine(step, steps, config.warmup))
    torch.manual_seed(config.seed)
    model.train()
    losses: list[float] = []
    with tqdm(batches(train, config.batch_size, steps, config.seed), total=steps, desc=name, unit="step") as bar:
        for rows in bar:
            inputs, labels = train.batch(rows)
            with torch.autocast("cpu", torch.bfloat16, enabled=config.bfloat16):
                loss = cross_entropy(head(features(inputs)).float(), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, config.clip)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{sum(losses[-10:]) / len(losses[-10:]):.3f}", refresh=False)
    model.eval()
    tail = losses[-max(1, steps // 10) :]
    return round(sum(tail) / len(tail), 4)


def batches(rows: Rows, size: int, steps: int, seed: int) -> Iterator[list[int]]:
    """Numbers of the rows of each step: epochs in random order, and for texts of like length within a few batches."""
    generator = torch.Generator().manual_seed(seed)
    queue: list[list[int]] = []
    for _ in range(steps):
        if not queue:
            order = torch.randperm(len(rows), generator=generator).tolist()
            queue = list(_chunks(order, size, rows.lengths, generator))
        yield queue.pop()


@torch.no_grad()
def right_rows(features: Features, head: nn.Linear, rows: Rows, name: str = "") -> Tensor:
    """Which rows get their own label (n)."""
    return _right(head(frozen_features(features, rows, name)), rows.labels)


def paired(before: Tensor, after: Tensor) -> dict[str, int]:
    """Rows that an expert gets right and its frozen head does not, and the other way round."""
    return {"gained": int((after & ~before).sum()), "lost": int((before & ~after).sum())}


def chance_of(gained: int, lost: int) -> float:
    """How likely at least so many rows are gained among those that changed, if gains and losses were equally likely.

    The exact test of McNemar, one-sided.

    >>> chance_of(3, 0), chance_of(1, 1)
    (0.125, 0.75)
    """
    return float(binomtest(gained, gained + lost, 0.5, "greater").pvalue) if gained + lost else 1.0


def write_expert(folder: Path, save: Callable[[Path], None], metrics: dict[str, Any]) -> None:
    """Write an expert's folder so that it appears only when it is complete.

    Args:
        folder: the expert's folder.
        save: writes model and processor into the folder it is given.
        metrics: goes into `metrics.json`.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save(partial)
    (partial / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def summary(name: str, metrics: dict[str, Any]) -> str:
    """One line about an expert, for the log."""
    frozen, tuned = metrics["frozen"], metrics["finetuned"]
    shares = "  ".join(f"{split} {frozen[split]:.1%} -> {tuned[split]:.1%}" for split in ("validation", "test"))
    return f"{name:20} {shares}  {metrics['seconds']:.0f} s"


def _chunks(
    order: list[int], size: int, lengths: Sequence[int] | None, generator: torch.Generator
) -> Iterator[list[int]]:
    """Full batches of an epoch; with lengths, those of sixteen batches at a time are sorted before they are cut."""
    if lengths is not None:
        window = 16 * size
        parts = (sorted(order[at : at + window], key=lengths.__getitem__) for at in range(0, len(order), window))
        order = [row for part in parts for row in part]
    full = [order[at : at + size] for at in range(0, len(order), size)]
    # A last batch with few rows would be a noisy step.
    full = [rows for rows in full if len(rows) == size] or full
    for number in torch.randperm(len(full), generator=generator).tolist():
        yield full[number]


def _cosine(step: int, steps: int, warmup: float) -> float:
    """Share of the learning rate at a step: rising through the warm-up, then half a cosine down to zero."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(1) == labels


def _share(right: Tensor) -> float:
    return round(float(right.float().mean()), 5)
