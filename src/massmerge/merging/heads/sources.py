"""Heads as a merge finds and writes them: cut from a task's model, given as a file, or made of texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from massmerge.bundle.layout import LABELS, LINEAR, head_folder
from massmerge.bundle.problem_types import problem_of
from massmerge.checkpoints import Base, Expert, HeadParts
from massmerge.checkpoints.backbone import language_class, split
from massmerge.checkpoints.expert_tensors import finite
from massmerge.checkpoints.skeleton import build, untie_output
from massmerge.errors import InputError
from massmerge.io.tensor_file import write_tensors
from massmerge.merging.heads.head import HeadSource, refuse_label_count
from massmerge.merging.heads.labels import read_labels
from massmerge.merging.heads.linear import linear_head
from massmerge.merging.heads.setfit import refuse_setfit
from massmerge.merging.heads.text import TextTower, read_texts, template_sets, text_head
from massmerge.recipe import FileHead, TaskRecipe, TextHead


def find_head(task: TaskRecipe, expert: Expert, base: Base, folder: Path, tower: TextTower | None = None) -> HeadSource:
    """The head that a task will have: the recipe's, else the expert's own.

    Args:
        task: the task in the recipe.
        expert: its expert.
        base: what the expert is a version of.
        folder: what the recipe's paths are relative to.
        tower: the base's text tower, for heads made of texts.

    Raises:
        InputError: the head's file is not a linear head, labels and head differ in number, or the head answers word by word.
    """
    if isinstance(task.head, FileHead):
        return linear_head(task, task.head, expert, base, folder)
    if isinstance(task.head, TextHead):
        return _text_head(task, task.head, folder, tower)
    refuse_setfit(expert.source)
    parts = expert.head
    labels = None if task.labels is None else read_labels(task.labels, folder)
    if parts is not None and parts.skeleton.class_name.endswith("ForTokenClassification"):
        raise InputError(
            f"is a {parts.skeleton.class_name}, which labels every token; a task answers an input as a whole. Save the "
            "expert without its head (AutoModel), and give `head:` if there is one for whole inputs."
        )
    if parts is None or not parts.skeleton.class_name.endswith("Classification"):
        if labels is not None or task.problem_type is not None:
            key = "labels" if labels is not None else "problem_type"
            raise InputError(f"has {key} in the recipe, but its expert has no classification head. Give `head:` too.")
        nbytes = sum(r.info.nbytes for r in parts.readings.values()) if parts else 0
        name = parts.skeleton.class_name if parts else None
        return HeadSource("shell" if parts else "none", name, None, nbytes, parts=parts)
    size = parts.skeleton.config.num_labels
    if labels is None:
        own = parts.skeleton.config.id2label
        labels = tuple(str(own.get(i, f"LABEL_{i}")) for i in range(size))
    refuse_label_count(labels, size)
    nbytes = sum(r.info.nbytes for r in parts.readings.values())
    problem = problem_of(task.problem_type or parts.skeleton.config.problem_type, size)
    return HeadSource("shell", parts.skeleton.class_name, labels, nbytes, problem, parts)


def find_further_heads(
    task: TaskRecipe, expert: Expert, base: Base, folder: Path, tower: TextTower | None = None
) -> dict[str, HeadSource]:
    """The further heads of a task, as `find_head` finds its own.

    Raises:
        InputError: one of them is none, or has another number of labels; the message begins with its name.
    """
    found = {}
    for name, head in task.heads.items():
        own = task.model_copy(update={"head": head, "labels": None, "problem_type": None})
        try:
            found[name] = find_head(own, expert, base, folder, tower)
        except InputError as error:
            raise InputError(f"heads.{name}: {error}") from None
    return found


def find_base_head(base: Base, heads: Iterable[HeadSource]) -> HeadSource | None:
    """The base's own language head, where a task writes with it: adapters seldom save one.

    None where every task has a head, the base generates nothing, or its output layer is tied to its embeddings.
    """
    name = language_class(base.skeleton.config)
    if name is None or all(head.kind != "none" for head in heads):
        return None
    skeleton = untie_output(build(base.skeleton.config, name), base.store.infos)
    readings, wanted = skeleton.match(base.store.infos).readings, split(skeleton, base.skeleton).head
    if not wanted or any(n not in readings for n in wanted):
        return None
    parts = HeadParts(skeleton, base.store, {n: readings[n] for n in wanted})
    return HeadSource("shell", name, None, sum(r.info.nbytes for r in parts.readings.values()), parts=parts)


def _text_head(task: TaskRecipe, head: TextHead, folder: Path, tower: TextTower | None) -> HeadSource:
    assert tower is not None, "a recipe with heads of texts has a base with a text tower"
    classes, templates = read_texts(head, folder)
    labels = classes if task.labels is None else read_labels(task.labels, folder)
    refuse_label_count(labels, len(classes))
    nbytes = 4 * len(classes) * (tower.width + 1)
    options = {"normalize": True, "scale": 1.0, "features": "auto"}
    problem = problem_of(task.problem_type, len(labels))
    return HeadSource(
        "linear", None, labels, nbytes, problem, make=partial(text_head, tower, classes, templates), options=options
    )


def write_head(folder: Path, head: HeadSource) -> None:
    """Write a head as a folder: its tensors, the class that runs them or the linear layer's options, and the labels."""
    if head.kind != "none" and head.folder is not None:
        shutil.copytree(head.folder, head_folder(folder))
    elif head.kind != "none":
        target = head_folder(folder)
        target.mkdir()
        if head.parts is not None:
            tensors = {name: head.parts.read(name) for name in head.parts.readings}
            options = head.parts.skeleton.config.to_dict() | {"architectures": [head.class_name]}
            options.pop("_name_or_path", None)
        else:
            assert head.make is not None
            tensors = head.make()
            options = head.options | ({} if head.features is None else {"features": head.features()})
        said = options.get("problem_type") or problem_of(None, len(head.labels or ()))
        if head.labels is not None and head.problem_type != said:
            options["problem_type"] = head.problem_type
        write_json(target / (LINEAR if head.parts is None else "config.json"), options)
        write_tensors(target / "model.safetensors", {n: finite(t, "its head", n) for n, t in tensors.items()})
    if head.labels is not None:
        write_json(folder / LABELS, list(head.labels))


def write_json(path: Path, data: object) -> None:
    """JSON with sorted keys, so that the same data gives the same bytes."""
    path.write_text(
        json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n"
    )


def named_files(tasks: Iterable[TaskRecipe]) -> Iterator[str]:
    """Files that tasks name beside their experts: a head's weights, label names."""
    for task in tasks:
        named: list[object] = [task.labels]
        for head in task.given_heads:
            if isinstance(head, FileHead):
                named += [head.weights, head.labels]
            else:
                named += [head.classes, None if str(head.templates) in template_sets() else head.templates]
        yield from (name for name in named if isinstance(name, str))
