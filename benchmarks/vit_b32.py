"""A CLIP ViT-B/32 vision tower with random weights and experts of it, as the folders that a merge reads.

Random weights suffice for cost. Updates have a falling spectrum plus noise, so that no path is favoured by low rank. What is
written is kept between runs, outside of the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
import yaml
from transformers import CLIPVisionConfig, CLIPVisionModel
from transformers.utils import logging

from massmerge.io.tensor_file import write_tensors

WIDTH, LABELS = 768, 10
logging.disable_progress_bar()


def cache_folder() -> Path:
    """Where benchmarks keep what takes long to make: `MASS_CACHE`, or the user's cache folder."""
    folder = Path(os.environ.get("MASS_CACHE", Path.home() / ".cache" / "massmerge")) / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_base(folder: Path) -> Path:
    """Write the base once."""
    path = folder / "base"
    if not (path / "config.json").is_file():
        torch.manual_seed(0)
        config = CLIPVisionConfig(
            hidden_size=WIDTH, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
            image_size=224, patch_size=32,
        )  # fmt: skip
        CLIPVisionModel(config).save_pretrained(path)
    return path


@torch.no_grad()
def make_expert(folder: Path, number: int) -> Path:
    """Write one expert and a linear head for it once."""
    path = folder / f"expert{number}"
    if not (path / "head.safetensors").is_file():
        model = CLIPVisionModel.from_pretrained(folder / "base")
        generator = torch.Generator().manual_seed(1000 + number)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 1e-3
            if parameter.ndim == 2:
                left = torch.randn(parameter.shape[0], 64, generator=generator) * torch.exp(-torch.arange(64) / 16)
                noise += left @ torch.randn(64, parameter.shape[1], generator=generator) * 1e-3
            parameter.add_(noise)
        model.save_pretrained(path)
        weight = torch.randn(LABELS, WIDTH, generator=generator) / WIDTH**0.5
        write_tensors(path / "head.safetensors", {"weight": weight})
    return path


def make_recipe(tasks: int, **sections: object) -> Path:
    """Base, experts and a recipe for that many tasks; `sections` are further sections of the recipe."""
    folder = cache_folder() / "vit_b32"
    make_base(folder)
    entries = []
    for i in range(tasks):
        make_expert(folder, i)
        head = {"weights": f"expert{i}/head.safetensors", "labels": [f"label{j}" for j in range(LABELS)]}
        entries.append({"name": f"task{i}", "expert": f"expert{i}", "head": head})
    name = "-".join([str(tasks), *(f"{k}_{'_'.join(map(str, v.values()))}" for k, v in sections.items())])  # type: ignore[attr-defined]
    path = folder / f"recipe-{re.sub(r'[^A-Za-z0-9.-]+', '_', name)}.yaml"
    path.write_text(yaml.safe_dump({"base": "base", "tasks": entries, **sections}, sort_keys=False), encoding="utf-8")
    return path
