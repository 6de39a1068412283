"""The YAML file that says on which data a bundle is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from massmerge.errors import InputError
from massmerge.io import yaml_file as yamlfile
from massmerge.io.yaml_file import Section
from massmerge.merging.heads.labels import read_labels
from massmerge.recipe import ProblemType

SPLIT = "{split}"
DEFAULT_SPLIT = "test"
TRAIN, VALIDATION = "train", "validation"
Metric = Literal["accuracy", "f1", "micro_f1", "spearman"]
_METRICS: dict[ProblemType | None, Metric] = {"multi_label_classification": "micro_f1", "regression": "spearman"}
_BETWEEN = "\n"  # in a set of labels that is kept as one text; names of labels are lines
_Share = Annotated[float, Field(gt=0.0, le=1.0)]
_Part = Annotated[float, Field(gt=0.0, lt=1.0)]


class SuiteTask(Section):
    """The evaluation data of one task: a table, a folder of files by class, or an id of the `datasets` library."""

    data: str | None = None
    """A .csv, .tsv, .jsonl or .parquet file; `{split}` in it stands for the split."""
    folder: str | None = None
    """A folder with a folder for each class; `{split}` in it stands for the split."""
    dataset: str | None = None
    """An id of the hub, with an optional `@revision`, or a folder that `datasets` can load."""
    config: str | None = None
    """The dataset's configuration, such as `sst2` of `glue`."""
    split: str | None = None
    """The dataset's split, if it is not called as `--split` says."""
    validation: _Part | None = None
    """The share of the rows of the split `train` that is the split `validation`; the rest stays `train`."""
    input: str | list[str] | None = None
    """The column of the inputs; two of them for pairs of texts, any number with a prompt."""
    prompt: str | None = None
    """What the model is asked: a text with the input columns in braces, such as `Is "{sentence}" good or bad?`."""
    label: str | None = None
    """The column of the labels; `label` by default."""
    labels: dict[str, str] | list[str] | str | None = None
    """What the head calls the values of that column: a mapping, or for numbers a list, or a file with one per line."""
    separator: str = Field(default=",", min_length=1)
    """For multi-label tasks: what stands between the labels of a row that are one text."""
    transposed: bool = False
    """Whether the pictures are stored with rows and columns exchanged, as EMNIST's are."""
    metric: Metric = "accuracy"
    """By default, `micro_f1` for multi-label heads and `spearman` for heads that give a number."""
    positive: str | None = None
    """For `f1`: the label that it is of; the mean over all labels without it."""
    reference: _Share | dict[str, _Share] | None = None
    """The expert's own figure on the same rows: of the split `test`, or for each split."""

    @field_validator("labels", mode="before")
    @classmethod
    def _as_text(cls, labels: Any) -> Any:
        """Labels as text: YAML reads `0: no` as a number and a truth value."""
        if isinstance(labels, dict):
            return {label_text(key): label_text(value) for key, value in labels.items()}
        return [label_text(value) for value in labels] if isinstance(labels, list) else labels

    @model_validator(mode="after")
    def _one_source(self) -> SuiteTask:
        given = [key for key in ("data", "folder", "dataset") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError("give one of data (a table), folder (of files by class) and dataset (a hub id)")
        for key in ("config", "split"):
            if getattr(self, key) is not None and self.dataset is None:
                raise ValueError(f"{key} belongs to dataset; for a table or a folder write {SPLIT} into the path")
        if self.folder is not None and (self.input is not None or self.label is not None):
            raise ValueError("a folder has no columns: its folders are the labels, their files the inputs")
        if self.folder is None and not self.columns:
            raise ValueError("input is missing: the column that holds the inputs")
        if self.prompt is not None:
            _refuse_prompt(self.prompt, self.columns)
        elif len(self.columns) > 2:
            raise ValueError("input is one column, or two of them for pairs of texts; more need a prompt")
        if self.positive is not None and self.metric != "f1":
            raise ValueError("positive belongs to metric: f1")
        if self.transposed and self.dataset is None:
            raise ValueError("transposed belongs to dataset")
        return self

    @property
    def columns(self) -> list[str]:
        """The columns of the inputs."""
        return [self.input] if isinstance(self.input, str) else list(self.input or [])

    def prompted(self, item: Any) -> Any:
        """An input as the model is asked it; an error that stands in its place stays one."""
        if self.prompt is None or isinstance(item, Exception):
            return item
        cells = item if isinstance(item, tuple) else (item,)
        return self.prompt.format(**dict(zip(self.columns, cells, strict=True)))

    @property
    def label_column(self) -> str:
        """The column of the labels."""
        return self.label or "label"

    def head_label(self, value: Any) -> str:
        """What the head calls a value of the label column."""
        text = label_text(value)
        if isinstance(self.labels, dict):
            return self.labels.get(text, text)
        if self.labels is not None and text.isdecimal() and int(text) < len(self.labels):
            return self.labels[int(text)]
        return text

    def head_labels(self, value: Any) -> str:
        """What the head calls the labels of a row that may have several: a list, or a text with separators; as one text."""
        if isinstance(value, str):
            value = [part.strip() for part in value.split(self.separator)]
        values = value if isinstance(value, list | tuple) else [value]
        return join_labels(self.head_label(one) for one in values if one not in (None, ""))

    def fitting(self, problem: ProblemType | None) -> SuiteTask:
        """The same with a metric that its head's answers can be measured by.

        Raises:
            InputError: the suite says another one.
        """
        metric = _METRICS.get(problem)
        if metric is None and self.metric == "micro_f1":
            raise InputError("`metric: micro_f1` is for multi-label heads; this one answers with one label.")
        if metric is None or metric == self.metric:
            return self
        if "metric" in self.model_fields_set:
            raise InputError(f"`metric: {self.metric}`: its head is a {problem}, which `metric: {metric}` is for.")
        return self.model_copy(update={"metric": metric})

    def with_label_file(self, folder: Path) -> SuiteTask:
        """The same with the names that a file of labels holds."""
        if not isinstance(self.labels, str):
            return self
        return self.model_copy(update={"labels": list(read_labels(self.labels, folder))})

    def place(self, split: str | None) -> str:
        """Path or id with the split filled in.

        Raises:
            InputError: a split is asked for that the data cannot be chosen by.
        """
        text = self.data or self.folder or self.dataset or ""
        if self.dataset is None and split is not None and SPLIT not in text:
            raise InputError(
                f"{text}: the split {split!r} was requested, but the path is the same for every split. "
                f"Write {SPLIT} into the path, or leave --split out."
            )
        if self.dataset is not None and split is not None and self.split not in (None, SPLIT, split):
            raise InputError(
                f"{text}: the split {split!r} was requested, but the suite sets split: {self.split}. "
                "Remove it from the suite, or leave --split out."
            )
        return text.replace(SPLIT, split or DEFAULT_SPLIT)

    def split_name(self, split: str | None) -> str:
        """The split of a dataset."""
        return (self.split or SPLIT).replace(SPLIT, split or DEFAULT_SPLIT)

    def is_part(self, split: str | None) -> bool:
        """Whether the rows of a split are a part of the data's own split `train`."""
        return self.validation is not None and split in (TRAIN, VALIDATION)

    def whole(self, split: str | None) -> tuple[SuiteTask, str | None]:
        """The task and the split of which the rows of a split are all, or a part."""
        return (self.model_copy(update={"split": None}), TRAIN) if self.is_part(split) else (self, split)

    def overlap(self, one: str | None, other: str | None) -> bool:
        """Whether two splits share rows: their data lies in one place, and they are not two parts of it."""
        places = [(task.place(name), task.split_name(name)) for task, name in map(self.whole, (one, other))]
        apart = self.is_part(one) and self.is_part(other) and one != other
        return places[0] == places[1] and not apart

    def reference_of(self, split: str | None) -> float | None:
        """The expert's own figure on a split, if the suite says it."""
        if isinstance(self.reference, dict):
            return self.reference.get(split or DEFAULT_SPLIT)
        return self.reference if split in (None, DEFAULT_SPLIT) else None


class Suite(Section):
    """Tasks with their evaluation data. Unknown keys are errors."""

    tasks: Annotated[dict[str, SuiteTask], Field(min_length=1)]
    name: str = ""
    validation: _Part | None = None
    """As in a task, for every task that does not say it."""
    shared_labels: list[list[str]] = Field(default_factory=list)
    """Groups of `task/label` that mean the same thing, as in a recipe."""
    generate: dict[str, Any] = Field(default_factory=dict)
    """For bundles that write their answers: options of transformers' `generate`, such as `max_new_tokens`."""

    @model_validator(mode="after")
    def _validation_of_all_tasks(self) -> Suite:
        for name, task in self.tasks.items():
            if self.validation is not None and task.validation is None:
                self.tasks[name] = task.model_copy(update={"validation": self.validation})
        return self

    @model_validator(mode="after")
    def _groups_name_tasks(self) -> Suite:
        for name in (name for group in self.shared_labels for name in group):
            task, slash, label = name.partition("/")
            if not (task and slash and label):
                raise ValueError(f"{name!r} in shared_labels: write task/label")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Suite:
        """Read a suite; without a name of its own it is called after its file.

        Raises:
            InputError: it cannot be read, or says something that no suite says; every fault is named with its line.
        """
        suite = cls.parse(yamlfile.read_text(Path(path), "suite"), str(path))
        return suite if suite.name else suite.model_copy(update={"name": Path(path).stem})

    @classmethod
    def parse(cls, text: str, name: str = "suite") -> Suite:
        """A suite from YAML text; `name` stands in messages."""
        return yamlfile.parse(cls, text, name, "suite")

    def fitting(self, problems: Mapping[str, ProblemType | None]) -> Suite:
        """The suite with metrics for what the heads of its tasks answer."""
        tasks = {}
        for name, task in self.tasks.items():
            try:
                tasks[name] = task.fitting(problems.get(name))
            except InputError as error:
                raise InputError(f"task {name}: {error}") from None
        return self.model_copy(update={"tasks": tasks})

    def refuse_measured_rows(self, measured: str | None) -> None:
        """Refuse to fit anything on the split `validation` where its rows are measured.

        Args:
            measured: the split that is measured; `test` without one.

        Raises:
            InputError: some tasks have the same rows in both.
        """
        same = [name for name, task in self.tasks.items() if task.overlap(VALIDATION, measured)]
        if same:
            raise InputError(
                f"the split {VALIDATION!r} of {', '.join(same)} contains the rows being measured. Name another "
                "split, or set "
                "the share of training rows for validation in the suite: `validation: 0.1`."
            )

    def only(self, tasks: list[str] | None) -> Suite:
        """The suite with some of its tasks.

        Raises:
            InputError: it has no such task.
        """
        unknown = [task for task in tasks or () if task not in self.tasks]
        if unknown:
            raise InputError(
                f"no task {', '.join(map(repr, unknown))} in the suite. Choose from {', '.join(self.tasks)}."
            )
        chosen = {name: task for name, task in self.tasks.items() if not tasks or name in tasks}
        return self.model_copy(update={"tasks": chosen})


def suite_and_folder(suite: Suite | str | Path, folder: str | Path | None = None) -> tuple[Suite, Path]:
    """A suite given as an object or as a path, with the folder that its own paths are relative to."""
    if isinstance(suite, Suite):
        return suite, Path(folder or ".")
    return Suite.load(suite), Path(folder) if folder is not None else Path(suite).resolve().parent


def _refuse_prompt(prompt: str, columns: list[str]) -> None:
    """Refuse a prompt that does not name each input column, and nothing else, in braces."""
    try:
        named = {name for _, name, _, _ in Formatter().parse(prompt) if name is not None}
    except ValueError as error:
        raise ValueError(f"prompt: {error}; write a literal brace twice") from None
    if named != set(columns):
        raise ValueError(
            f"prompt must name the input columns in braces ({', '.join(f'{{{c}}}' for c in columns) or 'there are none'}); "
            f"it names {', '.join(f'{{{n}}}' for n in sorted(named)) or 'none'}"
        )


def join_labels(labels: Iterable[str]) -> str:
    """A set of labels as one text, the same whatever their order."""
    return _BETWEEN.join(sorted(set(labels)))


def label_set(text: str | None) -> set[str]:
    """The labels of such a text; a single label is a set of one."""
    return set((text or "").split(_BETWEEN)) - {""}


def label_text(value: Any) -> str:
    """A label as text, however a file holds it: `3`, `3.0` and `"3"` are one label, and so are `True` and `"true"`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)
