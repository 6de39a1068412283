"""The folder that a merge writes and everything else reads: manifest, checksums, versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massmerge.bundle.download import find_bundle
from massmerge.bundle.factors import TaskFile
from massmerge.bundle.layout import (
    BASE,
    BASE_INDEX,
    BASE_WEIGHTS,
    HEAD,
    HEADS,
    LABELS,
    MANIFEST,
    PROCESSOR,
    RECIPE,
    STATISTICS,
    TASKS,
    factors_name,
    further_home,
    head_folder,
    holds_base,
    task_folder,
)
from massmerge.bundle.manifest import find_damage, read_manifest
from massmerge.bundle.problem_types import read_labels, read_problem
from massmerge.checkpoints.backbone import auto_class, language_class
from massmerge.checkpoints.pretrained import pretrained_config
from massmerge.errors import DamageError, InputError, MassError, listing
from massmerge.io.shards import shard_names
from massmerge.io.tensor_file import TensorInfo, read_header, read_tensor
from massmerge.linalg.factors import Factors
from massmerge.recipe import ProblemType, Recipe
from massmerge.routing.separation import delta_cosines


@contextmanager
def opened_in_words(path: Path) -> Iterator[None]:
    """What was merged can fail anywhere if its parts do not go together; who opens it is told that it is the folder."""
    try:
        yield
    except (MassError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{path}: its parts do not go together ({reason}). Merge again, or copy it again.") from error


@dataclass(frozen=True)
class BundleTask:
    """A task as the manifest describes it."""

    name: str
    source: str
    revision: str | None
    form: str
    head: str
    labels: tuple[str, ...] | None
    problem_type: ProblemType | None
    """What the outputs of its head mean; none without a head."""
    heads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Labels of its further heads, by name."""


class Bundle:
    """A bundle on disk.

    Args:
        path: the folder, or a hub id such as `me/name` or `me/name@revision`.
        check: whether every file's checksum is compared with the manifest's.

    Raises:
        InputError: not a bundle, or damaged.
    """

    def __init__(self, path: str | Path, *, check: bool = True) -> None:
        self.path = find_bundle(path)
        self.manifest = read_manifest(self.path)
        if self.manifest.get("method") != "mass":
            opener = auto_class(str(self.manifest.get("base", {}).get("class")))
            raise InputError(
                f"{path}: a {self.manifest.get('method')} merge, which is an ordinary checkpoint, not a bundle. "
                f"Load it with transformers: {opener}.from_pretrained({str(path)!r})."
            )
        if check:
            self.refuse_damage(self.damage())

    def refuse_damage(self, faults: list[str]) -> None:
        """Raise an error that lists what is not as the manifest says."""
        if faults:
            raise DamageError(f"{self.path}: damaged:{listing(faults)}\n  Merge again, or copy the bundle again.")

    def damage(
        self, progress: Callable[[str], None] = lambda name: None, *, sums: bool | Callable[[str], bool] = True
    ) -> list[str]:
        """As `find_damage`."""
        return find_damage(self.path, self.manifest, progress, sums=sums)

    @property
    def base_folder(self) -> Path:
        """The folder of the base: its configuration, and its weights unless they are kept by reference."""
        return self.path / BASE

    @cached_property
    def base_weights(self) -> list[Path]:
        """The files of the base's weights; none where they are kept by reference.

        Raises:
            InputError: their index names a file that is not the bundle's.
        """
        if BASE_WEIGHTS in self.manifest["files"] or BASE_INDEX not in self.manifest["files"]:
            return [self.path / BASE_WEIGHTS] * (BASE_WEIGHTS in self.manifest["files"])
        return [self.file(f"{BASE}/{name}") for name in shard_names(self.path / BASE_INDEX)]

    @property
    def processor_folder(self) -> Path:
        """The folder of the tokenizer or image processor."""
        return self.path / PROCESSOR

    def processor_files(self) -> dict[str, Path]:
        """The files of the tokenizer or image processor, by name."""
        start = f"{PROCESSOR}/"
        names = [name for name in self.manifest["files"] if name.startswith(start)]
        return {name.removeprefix(start): self.path / name for name in names}

    def head_folder(self, task: str) -> Path:
        """The folder of a task's head."""
        return head_folder(task_folder(self.path, task))

    def further_head(self, task: str, head: str) -> Path:
        """The folder of a further head of a task."""
        return head_folder(further_home(task_folder(self.path, task), head))

    def file(self, name: str) -> Path:
        """A file of the bundle; what the manifest does not name is never read."""
        if name not in self.manifest["files"]:
            raise InputError(f"{self.path}: its manifest does not list {name}. Merge again, or copy the bundle again.")
        return self.path / name

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that the bundle was made by."""
        recipe = Recipe.load(self.file(RECIPE))
        if [task.name for task in recipe.tasks] != [task["name"] for task in self.manifest["tasks"]]:
            raise InputError(f"{self.path}: recipe.yaml and the manifest name different tasks. Merge again.")
        return recipe

    @cached_property
    def tasks(self) -> list[BundleTask]:
        """The tasks, in order."""
        return [self._task(task) for task in self.manifest["tasks"]]

    def _task(self, said: dict[str, Any]) -> BundleTask:
        """A task with its labels and what they mean, which have files of their own."""
        labels = self._labels(f"{TASKS}/{said['name']}")
        problem = None if labels is None else read_problem(self.head_folder(said["name"]), len(labels))
        known = {key: said[key] for key in ("name", "source", "revision", "form", "head")}
        further = {name: self._labels(home) or () for name, home in self._further_homes.get(said["name"], {}).items()}
        return BundleTask(**known, labels=labels, problem_type=problem, heads=further)

    @cached_property
    def _further_homes(self) -> dict[str, dict[str, str]]:
        """For each task that has some, the folders of its further heads by their names."""
        found: dict[str, dict[str, str]] = {}
        for file in self.manifest["files"]:
            match file.split("/"):
                case [first, task, second, head, last] if (first, second, last) == (TASKS, HEADS, LABELS):
                    found.setdefault(task, {})[head] = file.removesuffix(f"/{LABELS}")
        return found

    def _labels(self, home: str) -> tuple[str, ...] | None:
        name = f"{home}/{LABELS}"
        return read_labels(self.file(name)) if name in self.manifest["files"] else None

    @property
    def ranks(self) -> dict[str, list[int]]:
        """For each factored matrix, the rank kept for each task in order (0: the task leaves it as it is)."""
        return dict(self.manifest["ranks"])

    @cached_property
    def headers(self) -> dict[str, dict[str, TensorInfo]]:
        """For each task, the tensors of its factors file."""
        return {t.name: read_header(self.factors_file(t.name)) for t in self.tasks}

    def task_file(self, task: str) -> TaskFile:
        """A task's factors and whole tensors, as they are stored."""
        if task not in self.headers:
            raise InputError(f"{self.path}: no task {task!r}. Choose from {', '.join(self.headers)}.")
        return TaskFile(self.headers[task])

    def factors_file(self, task: str) -> Path:
        """The file of a task's factors and whole tensors."""
        return self.file(factors_name(task))

    def factors(self, task: str, tensor: str) -> Factors | None:
        """A task's factors of one matrix, as they are stored; none where it leaves the base as it is."""
        return self.task_file(task).factors(tensor)

    def whole(self, task: str, tensor: str) -> Tensor | None:
        """A task's own value of a tensor without factors; none where it leaves the base as it is."""
        return self.task_file(task).whole(tensor)

    @cached_property
    def statistics(self) -> dict[str, Tensor]:
        """Norms, energy kept, cosines and the filter's choice, a row for each matrix of `ranks`."""
        header = read_header(self.file(STATISTICS))
        rows, tasks = len(self.ranks), len(self.manifest["tasks"])
        shapes = {
            "norm": (rows, tasks),
            "energy": (rows, tasks),
            "accepted": (rows, tasks),
            "cosine": (rows, tasks, tasks),
        }
        wrong = [n for n, shape in shapes.items() if n not in header or (rows and header[n].shape != shape)]
        if wrong:
            raise InputError(
                f"{self.path / STATISTICS}: {', '.join(wrong)} missing or of the wrong shape. Merge again."
            )
        return {name: read_tensor(info) for name, info in header.items()}

    @property
    def similarity(self) -> Tensor:
        """Cosines (T, T) of the tasks' deltas, all factored matrices together."""
        found = self.statistics
        return delta_cosines(found["cosine"], found["norm"], found["energy"])

    @property
    def router_kind(self) -> str:
        """The router in use: the recipe's, or the one that was fitted last."""
        return str(self.manifest.get("router_kind", self.recipe.router.kind))

    def confidence(self, kind: str) -> dict[str, float] | None:
        """Constants of a router's confidence, where `mass calibrate` has fitted them."""
        found: dict[str, float] | None = self.manifest.get("confidence", {}).get(kind)
        return found

    @property
    def takes_images(self) -> bool:
        """Whether the base is an image model."""
        return (self.processor_folder / "preprocessor_config.json").is_file() or "image_size" in self._base_config

    @property
    def writes(self) -> bool:
        """Whether its tasks answer with text: none has labels, and the base generates."""
        if any(task.labels is not None for task in self.tasks):
            return False
        return language_class(pretrained_config(self.base_folder)) is not None

    @cached_property
    def _base_config(self) -> dict[str, Any]:
        return pretrained_config(self.base_folder).to_dict()

    def bytes_of(self, prefix: str) -> int:
        """Bytes of the files whose path starts so."""
        return sum(int(e["bytes"]) for name, e in self.manifest["files"].items() if name.startswith(prefix))

    @property
    def base_dtype(self) -> str:
        """The type of the base's numbers, such as `float32`; by that of the factors in bundles that do not say."""
        if said := self.manifest["base"].get("dtype"):
            return str(said)
        kinds = [i.dtype for header in self.headers.values() for i in header.values() if i.dtype.is_floating_point]
        return str(kinds[0]).removeprefix("torch.") if kinds else "float32"

    @property
    def base_bytes(self) -> int:
        """Bytes of the base's weights, in the bundle or where it refers to."""
        return int(self.manifest["base"]["bytes"])

    @property
    def head_bytes(self) -> int:
        """Bytes of heads and label names, which no budget counts."""
        homes = [f"{TASKS}/{task.name}" for task in self.tasks]
        labels = sum(self.bytes_of(f"{home}/{LABELS}") for home in homes)
        further = sum(self.bytes_of(f"{home}/{HEADS}/") for home in homes)
        return labels + further + sum(self.bytes_of(f"{home}/{HEAD}/") for home in (*homes, BASE))

    @property
    def counted_bytes(self) -> int:
        """Bytes of everything but heads, the manifest included."""
        manifest = (self.path / MANIFEST).stat().st_size
        by_reference = 0 if holds_base(self.manifest["files"]) else self.base_bytes
        return manifest + self.bytes_of("") - self.head_bytes + by_reference
