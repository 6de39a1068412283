"""The YAML file that says what to merge."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from massmerge.errors import InputError
from massmerge.io import yaml_file
from massmerge.io.sizes import parse_bytes
from massmerge.io.yaml_file import Section

TASK_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_WINDOWS_NAMES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
FactorType = Literal["base", "float16", "int8"]
Activation = Literal["none", "relu", "gelu", "tanh", "silu", "sigmoid"]
MOST_LAYERS = 16  # of a head
Method = Literal[
    "mass", "average", "task_arithmetic", "ties", "dare", "consensus", "tsv_m", "iso_c", "iso_cts", "tsv_c", "emr"
]
METHODS: tuple[str, ...] = get_args(Method)
# The options of each method with their defaults: those of its paper, or of the public implementation that papers use.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mass": {"budget": 2.0, "rank": None, "factors": "base", "redundancy": {}, "base": "auto"},
    "average": {},
    "task_arithmetic": {"scale": "auto"},
    "ties": {"keep": 0.2, "combine": "mean", "scale": "auto"},
    "dare": {"drop": 0.5, "seed": 0, "scale": "auto"},
    "consensus": {"threshold": 0.6, "least": 2, "scale": "auto"},
    "tsv_m": {"rank": "1/T", "scale": "auto"},
    "iso_c": {"scale": "auto"},
    "iso_cts": {"common": 0.8, "scale": "auto"},
    "tsv_c": {"rank": "1/T"},
    "emr": {},
}
_SHARED = ("max_shard_size",)  # options of every method
_SHARD_SIZE = "5GB"
_PARTS_OF_SPACE = 3  # of which the subspaces that inputs are routed by fill one; see docs/research/routing.md
_SHARING = 8  # tasks, however many more there are
_Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Redundancy(Section):
    """Which tasks are left out of the fixed model because an earlier task already covers them."""

    metric: Literal["cosine", "angles"] = "cosine"
    threshold: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.3


class MergeOptions(Section):
    """How the experts become one. An option that the method does not have is an error."""

    method: Method = "mass"
    budget: Annotated[float, Field(gt=1.0)] | None = None
    """Bytes of the bundle without heads, as a multiple of the base's; 2.0 unless `rank` is given."""
    rank: str | int | float | None = None
    """`1/T` of the full rank (the paper's), a number, or below 1 the share of each delta's energy to keep."""
    factors: FactorType = "base"
    """How the factors' numbers are stored: as the base's, in 16 bits, or in 8 with a scale for every vector."""
    redundancy: Redundancy | Literal["none"] = Redundancy()
    base: Literal["auto", "copy", "by_reference"] = "auto"
    """Whether the bundle holds the base's weights; `auto` refers to a base over 2 GB where it lies."""
    max_shard_size: str | int | None = None
    """Bytes of tensors in a file of weights, such as `500MB`; 5GB by default. Weights that are larger get several files."""
    scale: Literal["auto"] | Annotated[float, Field(gt=0.0)] | None = None
    """Factor on the merged delta: `auto` is chosen on a suite's validation split, or the published one without a suite."""
    keep: _Share | None = None
    """Of each delta the share of entries that `ties` keeps, the largest."""
    combine: Literal["mean", "sum"] | None = None
    """What `ties` makes of the entries that agree in sign."""
    drop: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """The probability with which `dare` drops an entry."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """Of the entries that `dare` drops."""
    threshold: Annotated[float, Field(ge=0.0)] | None = None
    """An entry matters to a task, for `consensus`, if it is larger than this times what the other tasks add to it."""
    least: Annotated[int, Field(ge=1)] | None = None
    """How many tasks an entry must matter to, to be kept by `consensus`."""
    common: _Share | None = None
    """The share of directions that `iso_cts` takes from the sum of all deltas; the rest are the tasks' own."""

    @field_validator("rank", mode="plain")
    @classmethod
    def _is_rank(cls, rank: object) -> object:
        whole = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
        share = isinstance(rank, float) and 0.0 < rank < 1.0
        if rank is None or rank == "1/T" or whole or share:
            return rank
        raise ValueError("a rank is 1/T, a positive integer, or a share of energy between 0 and 1")

    @field_validator("max_shard_size")
    @classmethod
    def _is_size(cls, size: str | int | None) -> str | int | None:
        try:
            if size is not None and parse_bytes(size) < 1:
                raise InputError("a file of weights takes at least one byte.")
        except InputError as error:
            raise ValueError(str(error)) from None
        return size

    @field_validator("*", mode="before")
    @classmethod
    def _belongs_to_the_method(cls, value: object, info: ValidationInfo) -> object:
        method, name = info.data.get("method"), info.field_name
        if method is None or name == "method" or value is None or name in (*_DEFAULTS[method], *_SHARED):
            return value
        known = ", ".join((*_DEFAULTS[method], *_SHARED))
        raise ValueError(f"is not an option of {method}; its options are {known}")

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("rank") is not None and data.get("budget") is not None and data.get("method", "mass") == "mass":
            raise ValueError("give either budget or rank, not both")
        method = data.get("method", "mass")
        defaults = dict(_DEFAULTS.get(method, {})) if isinstance(method, str) else {}
        if data.get("rank") is not None:
            defaults.pop("budget", None)
        return {**defaults, **{key: value for key, value in data.items() if value is not None}}

    @property
    def static(self) -> bool:
        """Whether the result is an ordinary checkpoint, or one for each task, and not a bundle."""
        return self.method != "mass"

    @property
    def keeps_tasks(self) -> bool:
        """Whether the result is one checkpoint for each task: the methods whose user knows the task."""
        return self.method in ("tsv_c", "emr")

    @property
    def shard_bytes(self) -> int:
        """Bytes of tensors in a file of weights, at most."""
        return parse_bytes(self.max_shard_size or _SHARD_SIZE)

    def own(self) -> dict[str, Any]:
        """The options that the method has, with their values."""
        return {name: getattr(self, name) for name in _DEFAULTS[self.method]}


class FileHead(Section):
    """A head of linear layers, given as a file: `weight (labels, features)`, optionally `bias`; or several of them."""

    weights: str
    labels: str | list[str]
    layers: str | Annotated[list[str], Field(min_length=1, max_length=MOST_LAYERS)] | None = None
    """Names of the head's linear layers in the file, first to last, where it holds more than the head."""
    activation: Activation | None = None
    """What stands between several layers."""
    normalize: bool | None = None
    """Whether the features are scaled to length 1 first, as for heads of text embeddings; else as `modules.json` says."""
    scale: float = 1.0
    features: Literal["auto", "pooled", "cls", "mean"] = "auto"
    """What it reads: the backbone's pooled output, its first token, or the mean over real tokens."""


class TextHead(Section):
    """A head made of texts by the base's text tower: one embedding a class, the mean over the templates."""

    classes: str | list[str]
    """What the images show, as the templates name it: a list, or a file with one per line."""
    templates: str | list[str] = "photo"
    """Sentences with a place `{}` for the class: a list, a file with one per line, or the name of a set."""


def _head_kind(value: Any) -> str:
    """Which kind of head a mapping means, so that errors name the keys of that kind."""
    keys = value if isinstance(value, dict) else {type(value).__name__}
    return "text" if {"classes", "templates", "TextHead"} & set(keys) else "linear"


_GivenHead = Annotated[Annotated[FileHead, Tag("linear")] | Annotated[TextHead, Tag("text")], Discriminator(_head_kind)]


class TaskRecipe(Section):
    """One expert, its head and its labels."""

    name: str
    expert: str
    head: _GivenHead | None = None
    heads: dict[str, _GivenHead] = Field(default_factory=dict)
    """Further heads of the same expert, by name: an input that is routed to the task is answered by all of them."""
    labels: str | list[str] | None = None
    """Names of the labels, or a file with one per line; instead of those in the expert's config.json."""
    problem_type: ProblemType | None = None
    """What the head's outputs mean, in Hugging Face's words; instead of what the expert's config.json says."""
    inputs: str | None = None
    """File or folder of unlabelled inputs; where every task has some, the router is fitted on them after the merge."""
    column: str | None = None
    """Column of a table that holds the inputs."""

    @field_validator("name")
    @classmethod
    def _is_folder_name(cls, name: str) -> str:
        return task_name(name)

    @field_validator("heads")
    @classmethod
    def _are_folder_names(cls, heads: dict[str, _GivenHead]) -> dict[str, _GivenHead]:
        refuse_same_names(map(task_name, heads))
        return heads

    @property
    def given_heads(self) -> list[FileHead | TextHead]:
        """All heads that the recipe gives."""
        return [*([self.head] if self.head is not None else []), *self.heads.values()]


def task_name(name: str) -> str:
    """The name, if a folder can have it."""
    if not TASK_NAME.fullmatch(name) or _WINDOWS_NAMES.fullmatch(name) or name.endswith("."):
        raise ValueError(
            f"{name!r} is not a valid task name: use letters, digits, '_', '-' and '.', at most 100 of them"
        )
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


class RouterOptions(Section):
    """How an input finds its task."""

    kind: Literal["projection", "prototype", "linear", "nearest", "mlp", "tuned", "adapted"] = "projection"
    site: str | Annotated[list[str], Field(min_length=1)] = "auto"
    token: Literal["auto", "cls", "mean", "both", "last", "mean_and_last", "each"] = "auto"
    reference: Literal["auto", "template", "newline", "words", "none"] = "auto"
    """What a task's captured share is divided by: that of the empty prompt, of a newline, of random words, or nothing."""
    rank: Literal["auto", "full"] | Annotated[int, Field(ge=1)] = "auto"
    """How many singular vectors of each task route; see `Recipe.routing_rank`."""
    first_pass: Literal["base", "fixed"] = "base"
    score: Literal["residual", "l1", "mahalanobis", "energy"] = "residual"
    standardize: bool = True
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    unsure: Annotated[float, Field(ge=0.0)] = 0.3
    """With `site: auto` on images: an input whose best task leads by less is looked at again in all blocks."""
    candidates: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """How many tasks answer an input that is still unclear; auto: 4 for images that get a second look, else 1."""
    confidence: Annotated[float, Field(ge=0.0)] = 0.5
    """What a head's full certainty is worth then, in standard deviations of the vote."""
    top_k: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"


MergeKind = Literal["orthogonal", "plain", "weighted"]


class AnswerOptions(Section):
    """How a selected set becomes an answer."""

    merge: MergeKind = "orthogonal"
    """The adaptive merge inside a set."""
    score: Literal["logit", "logit_and_weight", "probability"] = "logit"
    """By what the best label over the heads of the set is chosen."""
    weight: Annotated[float, Field(ge=0.0)] = 1.0
    """The router's say in `logit_and_weight`: logit + weight · log(router's weight)."""


class Unknown(Section):
    """When to answer that an input belongs to no task. All are off at 0."""

    lift: Annotated[float, Field(ge=0.0)] = 0.0
    """Abstain if the best task's subspace holds less than this many times what a random one would; 1 is chance."""
    agreement: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Abstain if the voters agree less than this on the best task; 1 is complete agreement."""
    confidence: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Abstain if the probability that task and label are both right is less than this."""
    typicality: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Abstain if a smaller share of the tasks' own inputs is less typical; for bundles that `mass calibrate` has seen."""


class Recipe(Section):
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
        return cls.parse(yaml_file.read_text(Path(path), "recipe"), str(path))

    @classmethod
    def parse(cls, text: str, name: str = "recipe") -> Recipe:
        """A recipe from YAML text; `name` stands in messages."""
        return yaml_file.parse(cls, text, name, "recipe")

    def routing_rank(self, width: int, forms: Sequence[str]) -> int | None:
        """How many singular vectors of each task are used for routing at most; None for all that are kept.

        The more vectors, the better a task is answered once it is known; but together the subspaces then fill the space,
        overlap, and say less about an input. So full fine-tunes share a third of it, unless a rank was asked for. With many
        tasks that would be too few to know a task by; then each has the share of one of eight.

        Args:
            width: of the activations that are routed.
            forms: `full` or `adapter` for each expert.
        """
        if isinstance(self.router.rank, int):
            return self.router.rank
        if self.router.rank == "full" or self.merge.rank is not None or "full" not in forms:
            return None
        return width // (_PARTS_OF_SPACE * min(_SHARING, len(forms)))

    def dump(self) -> str:
        """The recipe as YAML, with every default spelled out."""
        data = self.model_dump(mode="json", exclude_none=True)
        for task in data["tasks"]:
            if not task["heads"]:  # which versions before it do not know
                del task["heads"]
        if self.router.rank == "auto":  # likewise
            del data["router"]["rank"]
        data["merge"] = {
            name: data["merge"][name] for name in ("method", *self.merge.own(), *_SHARED) if name in data["merge"]
        }
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
