"""The YAML file that says what to merge."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Discriminator, Field, Tag, field_validator

from massmerge.io import yaml_file as yamlfile
from massmerge.io.yaml_file import Part
from massmerge.merge_options import MergeOptions, Redundancy

__all__ = [
    "AnswerOptions",
    "LinearHead",
    "MergeOptions",
    "ProblemType",
    "Recipe",
    "Redundancy",
    "RouterOptions",
    "TaskRecipe",
    "TextHead",
    "Unknown",
]

TASK_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_WINDOWS_NAMES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


class LinearHead(Part):
    """A linear head given as a file: `weight (labels, features)`, optionally `bias`."""

    weights: str
    labels: str | list[str]
    normalize: bool = False
    """Whether the features are scaled to length 1 first, as for heads of text embeddings."""
    scale: float = 1.0
    features: Literal["auto", "pooled", "cls", "mean"] = "auto"
    """What it reads: the backbone's pooled output, its first token, or the mean over real tokens."""


class TextHead(Part):
    """A head made of texts by the base's text tower: one embedding a class, the mean over the templates."""

    classes: str | list[str]
    """What the images show, as the templates name it: a list, or a file with one a line."""
    templates: str | list[str] = "photo"
    """Sentences with a place `{}` for the class: a list, a file with one a line, or the name of a set."""


def _head_kind(value: Any) -> str:
    """Which kind of head a mapping means, so that faults are told in the words of that kind."""
    keys = value if isinstance(value, dict) else {type(value).__name__}
    return "text" if {"classes", "templates", "TextHead"} & set(keys) else "linear"


class TaskRecipe(Part):
    """One expert, its head and its labels."""

    name: str
    expert: str
    head: (
        Annotated[
            Annotated[LinearHead, Tag("linear")] | Annotated[TextHead, Tag("text")],
            Discriminator(_head_kind),
        ]
        | None
    ) = None
    labels: str | list[str] | None = None
    """Names of the labels, or a file with one a line; instead of those in the expert's config.json."""
    problem_type: ProblemType | None = None
    """What the head's outputs mean, in Hugging Face's words; instead of what the expert's config.json says."""

    @field_validator("name")
    @classmethod
    def _is_folder_name(cls, name: str) -> str:
        return task_name(name)


def task_name(name: str) -> str:
    """The name, if a folder can have it."""
    if not TASK_NAME.fullmatch(name) or _WINDOWS_NAMES.fullmatch(name) or name.endswith("."):
        raise ValueError(f"{name!r} is no folder name: use letters, digits, '_', '-' and '.', up to 100 of them")
    return name


def refuse_same_names(names: Iterable[str]) -> None:
    """Refuse two tasks of one name; case matters not to some file systems, and tasks are folders."""
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise ValueError(f"two tasks are called {name!r}: give each its own name")
        seen.add(name.lower())


def names_differ(tasks: list[TaskRecipe]) -> list[TaskRecipe]:
    """The tasks, if each has a name of its own."""
    refuse_same_names(task.name for task in tasks)
    return tasks


class RouterOptions(Part):
    """How an input finds its task."""

    kind: Literal["projection", "nearest", "prototype", "mlp"] = "projection"
    site: str | Annotated[list[str], Field(min_length=1)] = "auto"
    token: Literal["auto", "cls", "mean", "both", "each"] = "auto"
    first_pass: Literal["base", "fixed"] = "base"
    score: Literal["residual", "l1", "mahalanobis", "energy"] = "residual"
    standardize: bool = True
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    unsure: Annotated[float, Field(ge=0.0)] = 0.3
    """With `site: auto` on images: an input whose best task leads by less is looked at again in all blocks."""
    candidates: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """How many tasks answer an input that is still unsure; auto: 4 on images that are looked at again, else 1."""
    confidence: Annotated[float, Field(ge=0.0)] = 0.5
    """What a head's full certainty is worth then, in standard deviations of the vote."""
    top_k: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"


MergeKind = Literal["orthogonal", "plain", "weighted"]


class AnswerOptions(Part):
    """How a selected set becomes an answer."""

    merge: MergeKind = "orthogonal"
    """The adaptive merge inside a set."""
    score: Literal["logit", "logit_and_weight", "probability"] = "logit"
    """By what the best label over the heads of the set is chosen."""
    weight: Annotated[float, Field(ge=0.0)] = 1.0
    """The router's say in `logit_and_weight`: logit + weight · log(router's weight)."""


class Unknown(Part):
    """When to answer that an input belongs to no task. Both are off at 0."""

    lift: Annotated[float, Field(ge=0.0)] = 0.0
    """Abstain if the best task's subspace holds less than this many times what a random one would; 1 is chance."""
    agreement: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Abstain if the voters agree less than this on the best task; 1 is complete agreement."""


class Recipe(Part):
    """What to merge, and how. Unknown keys are errors."""

    base: str
    tasks: Annotated[list[TaskRecipe], Field(min_length=1)]
    processor: str | None = None
    """Folder or hub id of the tokenizer or image processor, if not the base's."""
    merge: MergeOptions = MergeOptions.model_validate({})
    router: RouterOptions = RouterOptions()
    answer: AnswerOptions = AnswerOptions()
    unknown: Unknown = Unknown()
    shared_labels: list[list[str]] = Field(default_factory=list)
    """Groups of `task/label` that mean the same thing."""

    @field_validator("tasks")
    @classmethod
    def _names_differ(cls, tasks: list[TaskRecipe]) -> list[TaskRecipe]:
        return names_differ(tasks)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a recipe.

        Raises:
            InputError: it cannot be read, or says something that no recipe says; every fault is named with its line.
        """
        return cls.parse(yamlfile.read_text(Path(path), "recipe"), str(path))

    @classmethod
    def parse(cls, text: str, name: str = "recipe") -> Recipe:
        """A recipe from YAML text; `name` stands in messages."""
        return yamlfile.parse(cls, text, name, "recipe")

    def dump(self) -> str:
        """The recipe as YAML, with every default spelled out."""
        data = self.model_dump(mode="json", exclude_none=True)
        data["merge"] = {name: data["merge"][name] for name in ("method", *self.merge.own()) if name in data["merge"]}
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
