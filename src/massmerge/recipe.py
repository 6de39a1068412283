"""The YAML file that says what to merge."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from massmerge.errors import InputError

TASK_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_WINDOWS_NAMES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LinearHead(_Part):
    """A linear head given as a file: `weight (labels, features)`, optionally `bias`."""

    weights: str
    labels: str | list[str]
    normalize: bool = False
    """Whether the features are scaled to length 1 first, as for heads of text embeddings."""
    scale: float = 1.0
    features: Literal["auto", "pooled", "cls", "mean"] = "auto"
    """What it reads: the backbone's pooled output, its first token, or the mean over real tokens."""


class TaskRecipe(_Part):
    """One expert, its head and its labels."""

    name: str
    expert: str
    head: LinearHead | None = None
    labels: str | list[str] | None = None
    """Names of the labels, or a file with one a line; instead of those in the expert's config.json."""

    @field_validator("name")
    @classmethod
    def _is_folder_name(cls, name: str) -> str:
        if not TASK_NAME.fullmatch(name) or _WINDOWS_NAMES.fullmatch(name) or name.endswith("."):
            raise ValueError(f"{name!r} is no folder name: use letters, digits, '_', '-' and '.', up to 100 of them")
        return name


class Redundancy(_Part):
    """Which tasks are left out of the fixed model because an earlier one already stands for them."""

    metric: Literal["cosine", "angles"] = "cosine"
    threshold: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.3


class MergeOptions(_Part):
    """How the experts become one."""

    method: Literal["mass", "tsv_m"] = "mass"
    budget: Annotated[float, Field(gt=1.0)] | None = None
    """Bytes of the bundle without heads, as a multiple of the base's; 2.0 unless `rank` is given."""
    rank: str | int | float | None = None
    """`1/T` of the full rank (the paper's), a number, or below 1 the share of each delta's energy to keep."""
    redundancy: Redundancy | Literal["none"] = Redundancy()
    base: Literal["copy", "by_reference"] = "copy"

    @field_validator("rank", mode="plain")
    @classmethod
    def _is_rank(cls, rank: object) -> object:
        whole = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
        share = isinstance(rank, float) and 0.0 < rank < 1.0
        if rank is None or rank == "1/T" or whole or share:
            return rank
        raise ValueError("a rank is 1/T, a whole number from 1 on, or a share of energy between 0 and 1")

    @model_validator(mode="before")
    @classmethod
    def _one_rule(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("rank") is not None and data.get("budget") is not None:
            raise ValueError("give either budget or rank, not both")
        return {"budget": 2.0, **data} if data.get("rank") is None else data


class RouterOptions(_Part):
    """How an input finds its task."""

    kind: Literal["projection", "nearest", "prototype", "mlp"] = "projection"
    site: str | list[str] = "auto"
    token: Literal["auto", "cls", "mean", "both"] = "auto"
    first_pass: Literal["base", "fixed"] = "base"
    score: Literal["residual", "l1", "mahalanobis", "energy"] = "residual"
    standardize: bool = True
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    top_k: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"


class AnswerOptions(_Part):
    """How a selected set becomes an answer."""

    merge: Literal["orthogonal", "plain", "weighted"] = "orthogonal"
    """The adaptive merge inside a set."""
    score: Literal["logit", "logit_and_weight", "probability"] = "logit"
    """By what the best label over the heads of the set is chosen."""
    weight: Annotated[float, Field(ge=0.0)] = 1.0
    """The router's say in `logit_and_weight`: logit + weight · log(router's weight)."""


class Unknown(_Part):
    """When to answer that an input belongs to no task. Both are off at 0."""

    lift: Annotated[float, Field(ge=0.0)] = 0.0
    """Abstain if the best task's subspace holds less than this many times what a random one would; 1 is chance."""
    agreement: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Abstain if the voters agree less than this on the best task; 1 is complete agreement."""


class Recipe(_Part):
    """What to merge, and how. Unknown keys are errors."""

    base: str
    tasks: Annotated[list[TaskRecipe], Field(min_length=1)]
    processor: str | None = None
    """Folder or hub id of the tokenizer or image processor, if not the base's."""
    merge: MergeOptions = MergeOptions.model_validate({})
    router: RouterOptions = RouterOptions()
    answer: AnswerOptions = AnswerOptions()
    unknown: Unknown = Unknown()
    shared_labels: list[list[str]] = []
    """Groups of `task/label` that mean the same thing."""

    @field_validator("tasks")
    @classmethod
    def _names_differ(cls, tasks: list[TaskRecipe]) -> list[TaskRecipe]:
        seen: dict[str, str] = {}
        for task in tasks:
            # Case matters not to some file systems, and tasks are folders.
            if task.name.lower() in seen:
                raise ValueError(f"two tasks are called {task.name!r}: give each its own name")
            seen[task.name.lower()] = task.name
        return tasks

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a recipe.

        Raises:
            InputError: it cannot be read, or says something that no recipe says; every fault is named with its line.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise InputError(f"{path}: no such recipe.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read ({error}).") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "recipe") -> Recipe:
        """A recipe from YAML text; `name` stands in messages."""
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            data = yaml.safe_load(text)
            repeated = _repeated_keys(node)
        except RecursionError:
            raise InputError(f"{name}: an anchor in it refers to itself.") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{name}:{mark.line + 1}" if mark else name
            raise InputError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
        if not isinstance(data, dict):
            raise InputError(f"{name}: a recipe is a mapping with the keys base and tasks.")
        faults = [f"{name}:{line}: the key {key!r} stands there twice" for key, line in repeated]
        try:
            recipe = cls.model_validate(data)
        except ValidationError as error:
            raise InputError("\n".join([*faults, *_faults(name, node, data, error)])) from None
        if faults:
            raise InputError("\n".join(faults))
        return recipe

    def dump(self) -> str:
        """The recipe as YAML, with every default spelled out."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)


def _faults(name: str, node: yaml.Node | None, data: Any, error: ValidationError) -> list[str]:
    """Every fault in the recipe's own words: line, key, what is wrong, what would be right."""
    found: dict[tuple[str | int, ...], list[Any]] = {}
    for one in error.errors():
        found.setdefault(_path_in(data, one["loc"], missing=one["type"] == "missing"), []).append(one)
    # Where a value may be of several kinds, the kind that failed further inside is the one that was meant.
    meant = [path for path in found if not any(len(p) > len(path) and p[: len(path)] == path for p in found)]
    return [f"{name}:{_line(node, path)}: {_fault(path, found[path])}" for path in meant]


def _path_in(data: Any, location: Sequence[str | int], *, missing: bool) -> tuple[str | int, ...]:
    """The keys among the parts of an error's location; the others name the alternatives that were tried."""
    path: list[str | int] = []
    for part in location:
        if (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int)):
            path, data = [*path, part], data[part]  # type: ignore[index]
    return (*path, location[-1]) if missing else tuple(path)


def _fault(path: Sequence[str | int], errors: Sequence[Any]) -> str:
    key, kind, given = ".".join(str(p) for p in path) or "recipe", errors[0]["type"], errors[0]["input"]
    if kind == "extra_forbidden":
        return f"unknown key {key!r} (known here: {', '.join(_known_keys(path[:-1]))})"
    if kind == "missing":
        return f"{key!r} is missing"
    if kind == "too_short":
        return f"{key!r} is empty; name at least one"
    messages = (e["msg"].removeprefix("Value error, ").removeprefix("Input ") for e in errors)
    words = " or ".join(dict.fromkeys(messages)).replace(" or should be ", " or ")
    words = re.sub(r"a valid dictionary or instance of \w+", "a mapping of keys to values", words)
    if kind == "string_type" and isinstance(given, int | float):
        words += "; write it in quotes"
    shown = "" if isinstance(given, dict | list) or repr(given) in words else f" (it is {given!r})"
    return f"{key!r}: {words}{shown}"


def _known_keys(path: Sequence[str | int]) -> list[str]:
    """Keys of the part of a recipe at that path."""
    parts: dict[str, type[BaseModel]] = {
        "tasks": TaskRecipe, "head": LinearHead, "merge": MergeOptions, "router": RouterOptions, "redundancy": Redundancy,
        "answer": AnswerOptions, "unknown": Unknown,
    }  # fmt: skip
    names = [p for p in path if isinstance(p, str)]
    part = parts.get(names[-1]) if names else Recipe
    return list(part.model_fields) if part else []


def _line(node: yaml.Node | None, path: Sequence[str | int]) -> int:
    """The line (from 1) of the last part of a path that stands in the text."""
    line = 1
    for key in path:
        if isinstance(node, yaml.MappingNode):
            pair = next(((k, v) for k, v in node.value if k.value == str(key)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _repeated_keys(node: yaml.Node | None) -> list[tuple[str, int]]:
    """Keys that a mapping has twice; YAML's reader would keep the last without a word."""
    found: list[tuple[str, int]] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                found.append((key.value, key.start_mark.line + 1))
            seen.add(key.value)
            found += _repeated_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            found += _repeated_keys(value)
    return found
