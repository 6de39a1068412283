"""Fine-tune the vision suite's experts: `python -m benchmarks.suites.vision.experts --tasks mnist,usps`."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, Dinov2ForImageClassification
from transformers.utils import logging

from benchmarks.suites.fetch import cache_root
from benchmarks.suites.finetune import Config, Rows, changed, expert_parser, finetune, summary, write_expert
from benchmarks.suites.splits import read_split
from benchmarks.suites.vision.backbone import make_base
from benchmarks.suites.vision.tasks import TASKS, make_data
from benchmarks.suites.vision.vary import other_part, turned

# Small tasks are shown in variations.
VARIED: dict[str, Callable[[Image.Image, random.Random], Image.Image]] = {
    "keys": other_part,
    "animals": other_part,
    "solar_defect": turned,
}
# Larger steps make this base forget more than it learns: at 1e-4 its experts of digits were worse than their frozen heads.
PROTOCOL = Config(samples=1600, lr=3e-5)
QUICK_ROWS = {"train": 256, "validation": 64, "test": 64}


def experts_folder() -> Path:
    """Where the experts lie."""
    return cache_root() / "vision" / "experts"


def make_expert(task: str, config: Config, quick: bool = False) -> Path:
    """Fine-tune one task's expert once: a folder with `metrics.json` is left as it is."""
    folder = experts_folder() / task
    if (folder / "metrics.json").is_file():
        return folder
    base, data = make_base(), make_data(task)
    processor = AutoImageProcessor.from_pretrained(base)

    def collate(images: list[bytes]) -> Tensor:
        opened = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        return processor(images=opened, return_tensors="pt")["pixel_values"]

    def varied(images: list[bytes]) -> Tensor:
        opened = [VARIED[task](Image.open(io.BytesIO(image)).convert("RGB"), chance) for image in images]
        return processor(images=opened, return_tensors="pt")["pixel_values"]

    chance = random.Random(config.seed)
    splits = {split: read_split(data, split, "image") for split in ("train", "validation", "test")}
    classes = sorted(set(splits["train"][1]))
    rows = {
        split: Rows(images[:most], torch.tensor([classes.index(name) for name in names[:most]]), collate)
        for split, (images, names) in splits.items()
        for most in [QUICK_ROWS[split] if quick else None]
    }
    model = Dinov2ForImageClassification.from_pretrained(
        base,
        num_labels=len(classes),
        id2label=dict(enumerate(classes)),
        label2id={name: i for i, name in enumerate(classes)},
    )

    def features(pixels: Tensor) -> Tensor:
        """What `Dinov2ForImageClassification` gives its classifier."""
        hidden = model.dinov2(pixels).last_hidden_state
        return torch.cat([hidden[:, 0], hidden[:, 1:].mean(dim=1)], dim=1)

    metrics = finetune(
        model,
        features,
        model.classifier,
        rows["train"],
        rows["validation"],
        rows["test"],
        config,
        name=task,
        collate=varied if task in VARIED else None,
    )

    def save(target: Path) -> None:
        model.save_pretrained(target)
        processor.save_pretrained(target)

    write_expert(folder, save, {**metrics, "varied": task in VARIED, "task": task, "quick": quick})
    print(summary(task, metrics), flush=True)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    options = expert_parser(__doc__).parse_args(arguments)
    logging.disable_progress_bar()
    for task in options.tasks.split(",") if options.tasks else TASKS:
        make_expert(task, changed(PROTOCOL, options), options.quick)


if __name__ == "__main__":
    main()
