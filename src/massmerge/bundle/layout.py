"""Where things lie in a bundle, and in the folder of a static merge. Nobody else spells these names."""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path

from massmerge.io.shards import INDEX, WEIGHTS

FORMAT_VERSION = 4
"""The newest that is read. A bundle states the oldest format that describes it: earlier versions open what they can."""
FIRST_FORMAT, ENCODED_FORMAT, LAYERED_FORMAT, SHARDED_FORMAT = 1, 2, 3, 4
"""With factors of the base's type; of another; with heads of several linear layers; with weights in several files."""
MANIFEST = "mass.json"
RECIPE, STATIC_RECIPE = "recipe.yaml", "mass_recipe.yaml"
CARD = "README.md"
STATISTICS = "statistics.safetensors"
FIXED = "fixed.safetensors"
ROUTER = "router.safetensors"
BASE, PROCESSOR, TASKS = "base", "processor", "tasks"
LOADED = (BASE, PROCESSOR, TASKS)
"""Folders whose files are loaded by libraries that read whatever lies there."""
BASE_CONFIG, BASE_WEIGHTS = f"{BASE}/config.json", f"{BASE}/{WEIGHTS}"
BASE_INDEX = f"{BASE_WEIGHTS}{INDEX}"
_BASE_SHARD = re.compile(rf"{BASE}/model-\d{{5}}-of-\d{{5}}\.safetensors")
HEADS = "heads"  # of a static merge; of a task the further ones
FACTORS, HEAD, LABELS, LINEAR = "factors.safetensors", "head", "labels.json", "linear.json"  # of a task
MOVED = "replaced"  # where a work folder keeps a bundle that is about to be replaced
LEFT_OVER = (f".{MANIFEST}.draft", f".{ROUTER}.draft")
"""Drafts that earlier versions left in a bundle when they were killed; of no use to anyone."""


def task_folder(bundle: Path, task: str) -> Path:
    """The folder of a task: its factors, head and labels."""
    return bundle / TASKS / task


def head_folder(home: Path) -> Path:
    """The folder of a head: of a task's folder, or of the base's, which keeps a language head."""
    return home / HEAD


def further_home(home: Path, head: str) -> Path:
    """The folder of a task's further head and its labels."""
    return home / HEADS / head


def factors_name(task: str) -> str:
    """The file of a task's factors, as the manifest names it."""
    return f"{TASKS}/{task}/{FACTORS}"


def work_folder(target: Path, kind: str = "partial") -> Path:
    """The folder beside a target in which a command works."""
    return target.parent / f".{target.name}.{kind}"


def holds_tensors(name: str) -> bool:
    """Whether a file of a bundle is one of the large ones, which stay on disk and are mapped."""
    return name == BASE_WEIGHTS or name.endswith(f"/{FACTORS}") or _BASE_SHARD.fullmatch(name) is not None


def holds_base(files: Container[str]) -> bool:
    """Whether a bundle with these files holds its base's weights, in one file or in several."""
    return BASE_WEIGHTS in files or BASE_INDEX in files
