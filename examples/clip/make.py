"""Writes the paper's recipes and suites from tasks.yaml, such as `python make.py ViT-B-32 8`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
# The base on the hub, FusionBench's name of its experts, and the site that the paper routes at.
MODELS = {
    "ViT-B-32": ("openai/clip-vit-base-patch32", "tanganke/clip-vit-base-patch32", "M9"),
    "ViT-B-16": ("openai/clip-vit-base-patch16", "tanganke/clip-vit-base-patch16", "M9"),
    "ViT-L-14": ("openai/clip-vit-large-patch14", "tanganke/clip-vit-large-patch14", "M20"),
}
COUNTS = (8, 14, 20, 33)
# How names in data differ from those that people read.
RULES: dict[str, Callable[[int, str], str]] = {
    "underscores": lambda number, name: name.replace(" ", "_"),
    "hyphens": lambda number, name: name.replace(" ", "-"),
    "titled": lambda number, name: name.title().replace(" ", "_"),
    "numbered": lambda number, name: f"{number:03}.{name.replace(' ', '_')}",
}


def chosen_tasks(model: str, count: int, experts: str, folder: Path = HERE) -> tuple[list[dict[str, Any]], list[str]]:
    """The first tasks of the list, and the names of those that have no expert."""
    tasks = yaml.safe_load((folder / "tasks.yaml").read_text(encoding="utf-8"))["tasks"][:count]
    if count == 33 and model != "ViT-B-32":
        raise SystemExit("experts of the last 13 tasks are published for ViT-B-32 only")
    good = [task for task in tasks if experts == "paper" or "tanganke" in task]
    return [_of_todays_data(task, folder) for task in good], [task["name"] for task in tasks if task not in good]


def _of_todays_data(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A task of which new editions have new classes takes those that its data have, where they are there."""
    found = sorted({path.name for path in (folder / "data" / task["name"]).glob("*/*") if path.is_dir()})
    return {**task, "classes": found} if found and task.get("grows") else task


def _paper_names(task: dict[str, Any], folder: Path) -> list[str] | None:
    """The classes in the words that the heads of the paper's experts were made of; none where those are the same."""
    said = task.get("paper_names")
    if said is None or isinstance(said, list):
        return said
    if said not in RULES:
        return _lines(folder / "classes" / said)
    classes = task["classes"] if isinstance(task["classes"], list) else _lines(folder / "classes" / task["classes"])
    return [RULES[said](number, name) for number, name in enumerate(classes, 1)]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def recipe(model: str, tasks: list[dict[str, Any]], experts: str, folder: Path = HERE) -> dict[str, Any]:
    """The recipe, in the paper's setting."""
    base, family, site = MODELS[model]

    def expert(task: dict[str, Any]) -> str:
        return f"crisostomi/{model}-{task['expert']}" if experts == "paper" else f"{family}_{task['tanganke']}"

    def head(task: dict[str, Any]) -> dict[str, Any]:
        templates, names = task.get("templates", "photo"), _paper_names(task, folder) if experts == "paper" else None
        if names is None:
            return {"head": {"classes": _classes(task), "templates": templates}}
        return {"head": {"classes": names, "templates": templates}, "labels": _classes(task)}

    return {
        "base": base,
        "tasks": [{"name": task["name"], "expert": expert(task), **head(task)} for task in tasks],
        "merge": {"rank": "1/T"},
        "router": {"first_pass": "fixed", "site": site, "token": "cls", "top_k": 3},
        "shared_labels": shared_labels(tasks),
    }


def suite(tasks: list[dict[str, Any]], folder: Path = HERE) -> dict[str, Any]:
    """The suite: hub datasets, or folders by class in data/, which are named as in the download."""
    found: dict[str, Any] = {}
    for task in tasks:
        if "dataset" not in task:
            found[task["name"]] = {"folder": f"data/{task['name']}/{{split}}"}
            if names := _paper_names(task, folder):
                labels = task["classes"] if isinstance(task["classes"], list) else _lines(folder / _classes(task))
                found[task["name"]]["labels"] = dict(zip(names, labels, strict=True))
            continue
        said = {key: task[key] for key in ("dataset", "config", "split", "label", "transposed") if key in task}
        found[task["name"]] = {
            **said,
            "input": task.get("input", "image"),
            "labels": task.get("data_labels", _classes(task)),
        }
    return {"validation": 0.1, "tasks": found, "shared_labels": shared_labels(tasks)}  # the paper's share of train


def shared_labels(tasks: list[dict[str, Any]]) -> list[list[str]]:
    """Labels of several tasks that mean the same: digits, and what STL10 and CIFAR10 show."""
    groups: dict[str, list[str]] = {}
    for task in tasks:
        if isinstance(task["classes"], list) and task["classes"][0] in ("0", "airplane"):
            for label in task["classes"]:
                groups.setdefault(label, []).append(f"{task['name']}/{label}")
    return [group for group in groups.values() if len(group) > 1]


def _classes(task: dict[str, Any]) -> Any:
    return task["classes"] if isinstance(task["classes"], list) else f"classes/{task['classes']}"


def write(model: str, count: int, experts: str, folder: Path = HERE) -> list[Path]:
    """Write recipe and suite beside the class lists."""
    tasks, without = chosen_tasks(model, count, experts, folder)
    name = f"{model}-{count}" + ("" if experts == "paper" else f"-{experts}")
    paths = [folder / f"recipe-{name}.yaml", folder / f"suite-{name}.yaml"]
    for path, data in zip(paths, (recipe(model, tasks, experts, folder), suite(tasks, folder)), strict=True):
        path.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), encoding="utf-8")
    if without:
        sys.stderr.write(f"left out, for want of an expert: {', '.join(without)}\n")
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("tasks", type=int, choices=COUNTS)
    parser.add_argument("--experts", choices=("paper", "tanganke"), default="paper", help="whose fine-tuned towers")
    given = parser.parse_args()
    for written in write(given.model, given.tasks, given.experts):
        sys.stdout.write(f"{written.name}\n")
