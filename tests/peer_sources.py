"""What routed peers are made of: tiny bases with experts, and a few inputs."""

from functools import cache

import torch
import yaml
from safetensors.torch import save_file

from massmerge.merging.open_recipe import open_recipe
from massmerge.recipe import Recipe
from models import FAMILIES, rows_of, write_family

TASKS = {"a": 2, "b": 3, "c": 4}


def peer_folder(root, name):
    """A family's base and experts with their recipe, made once a run."""
    folder = root / f"peers-{name}"
    if not folder.exists():
        folder.mkdir()
        if name == "clip":
            _write_clip(folder)
        else:
            write_family(folder, name, TASKS)
    return folder


def _write_clip(folder):
    """A CLIP tower with experts that have linear heads of their own."""
    family = FAMILIES["clip"]
    base = family.make_base()
    base.save_pretrained(folder / "base")
    tasks = []
    for seed, (task, labels) in enumerate(TASKS.items()):
        family.make_expert(base, seed).save_pretrained(folder / task)
        save_file({"weight": torch.randn(labels, 32)}, folder / f"{task}.safetensors")
        head = {"weights": f"{task}.safetensors", "labels": [f"{task}{i}" for i in range(labels)]}
        tasks.append({"name": task, "expert": task, "head": head})
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"base": "base", "tasks": tasks}, sort_keys=False))


@cache
def opened(folder):
    """A folder's recipe with its sources, opened once."""
    return open_recipe(Recipe.load(folder / "recipe.yaml"), folder, download=False)


def some_inputs(name, count=4):
    """A few unlabelled inputs of each task."""
    return {task: rows_of(FAMILIES[name].make_inputs(count, seed)) for seed, task in enumerate(TASKS)}


def is_mlp(path):
    """Whether a linear layer of BERT is one of its MLPs."""
    return "intermediate" in path or (path.endswith("output.dense") and "attention" not in path)
