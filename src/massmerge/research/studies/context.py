"""What a study works with: checked data, the bundle, the recipe, and cells that survive a kill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import massmerge
from massmerge.bundle.layout import MANIFEST
from massmerge.bundle.reader import Bundle
from massmerge.engines.job import Engine
from massmerge.errors import InputError
from massmerge.evaluation.experts import Experts, expert_answers, open_experts
from massmerge.evaluation.from_recipe import open_sources
from massmerge.evaluation.metrics import Given, shared_groups, statistic
from massmerge.evaluation.prepared import PreparedEvaluation
from massmerge.evaluation.run import Progress, silent
from massmerge.evaluation.suite import DEFAULT_SPLIT
from massmerge.merging.open_recipe import OpenedRecipe, open_recipe
from massmerge.merging.run import merge
from massmerge.model.inputs import Row
from massmerge.model.load import load
from massmerge.model.model import Model
from massmerge.model.row_job import EngineModel
from massmerge.model.speed import fast_at_once
from massmerge.recipe import Recipe
from massmerge.research.studies.cells import Cells, checksum
from massmerge.research.studies.settings import Sample, StudySettings

_TIMED = 16  # inputs whose forward pass tells how long others will take


class StudyContext:
    """What a study works with.

    Args:
        ready: the measured rows, already checked.
        bundle: the bundle.
        cache: folder of everything that is not computed twice.
        settings: options of the study.
        recipe: the recipe with the folder that its paths start from; none if the experts are not known.
        other_rows: gives at most so many rows of each task of the split `validation`; none if there is no such split.
        engine: whose workers merge, and answer by sets; by default this process.
        progress: wraps iterables whose items take time.
        tell: called with a sentence on what is being done.
    """

    def __init__(
        self,
        ready: PreparedEvaluation,
        bundle: Path,
        cache: Path,
        settings: StudySettings,
        *,
        recipe: tuple[Recipe, Path] | None = None,
        other_rows: Callable[[int | None], PreparedEvaluation] | None = None,
        engine: Engine | None = None,
        progress: Progress = silent,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.ready, self.bundle, self.cache, self.settings = ready, bundle, cache, settings
        self._recipe, self._other_rows, self.engine = recipe, other_rows, engine
        self.progress, self.tell = progress, tell
        self.cells = Cells(cache / "cells.jsonl")

    # Data

    @property
    def tasks(self) -> list[str]:
        """Tasks of the bundle, in order; an input may be routed to any of them."""
        return self.ready.tasks

    @property
    def measured(self) -> list[str]:
        """Tasks of the suite."""
        return list(self.ready.data)

    @cached_property
    def samples(self) -> list[Sample]:
        """Every row that is measured, task by task."""
        return [
            Sample(task, place, label)
            for task, data in self.ready.data.items()
            for place, label in enumerate(data.labels)
        ]

    @property
    def generation(self) -> dict[str, Any]:
        """Options with which texts are written; none where answers are labels."""
        return dict(self.ready.suite.generate) if self.ready.writes else {}

    @cached_property
    def owners(self) -> torch.Tensor:
        """For each sample the position of its task in the bundle (n,)."""
        return torch.tensor([self.tasks.index(sample.task) for sample in self.samples])

    def read_inputs(self) -> None:
        """Copy all inputs to disk, if that has not been done."""
        for one in self.progress(self.ready.data.values(), "reading", len(self.ready.data)):
            one.read_inputs()

    def input(self, sample: Sample) -> Any:
        """The input of a sample, as a model takes it.

        Raises:
            InputError: it cannot be read.
        """
        item = self.ready.data[sample.task].inputs[sample.place]
        if isinstance(item, Exception):
            raise InputError(f"{self.ready.data[sample.task].names[sample.place]}: {item}")
        return item

    def stored(self, sample: Sample) -> Any:
        """The input of a sample as workers are given it: an image as its bytes; errors as above."""
        self.input(sample)
        return self.ready.data[sample.task].inputs.stored(sample.place)

    @cached_property
    def contents(self) -> list[str]:
        """Checksum of each sample's input, by which answers to it are found again in other draws of rows."""
        return [checksum(self.ready.data[s.task].inputs.content(s.place).hex()) for s in self.samples]

    def size(self, sample: Sample) -> int:
        """Bytes of a sample's input; those of like size share a batch, which saves padding."""
        return self.ready.data[sample.task].inputs.size(sample.place)

    def support(self, count: int) -> dict[str, list[Any]]:
        """Inputs of each measured task from the split `validation`, drawn by the seed; they are given without labels."""
        found = self._validation_rows(count)
        return {task: [data.inputs[place] for place in range(len(data))] for task, data in found.data.items()}

    @cached_property
    def validation(self) -> StudyContext:
        """The same study on the split `validation`."""
        other = self.validated_by(self.settings.limit)
        other.__dict__["model"] = self.model
        return other

    def validated_by(self, count: int | None) -> StudyContext:
        """The same study on at most so many rows of each task of the split `validation`, drawn by the seed.

        Raises:
            InputError: the suite has no such split, or it is the one that is measured.
        """
        settings = StudySettings(**{**vars(self.settings), "split": "validation", "limit": count})
        return self._like(self._validation_rows(count), self.bundle, settings)

    def with_bundle(self, bundle: Path) -> StudyContext:
        """The same study of another bundle of the same tasks."""
        return self._like(self.ready, bundle, self.settings)

    def _like(self, ready: PreparedEvaluation, bundle: Path, settings: StudySettings) -> StudyContext:
        other = StudyContext(
            ready, bundle, self.cache, settings, recipe=self._recipe, other_rows=self._other_rows, engine=self.engine,
            progress=self.progress, tell=self.tell,
        )  # fmt: skip
        other.cells = self.cells
        return other

    def _validation_rows(self, limit: int | None) -> PreparedEvaluation:
        if self._other_rows is None:
            raise InputError("the suite has no split 'validation' beside the rows that are measured.")
        found = self._other_rows(limit)
        for data in found.data.values():
            data.read_inputs()
        return found

    # The bundle

    @cached_property
    def model(self) -> Model:
        """The loaded bundle, with its own router."""
        with fast_at_once():  # as workers load it; and what was asked of an earlier run shows in no digit of this one's
            return load(self.bundle, **self._loading, check=True)

    @property
    def _loading(self) -> dict[str, Any]:
        # What a study has merged by itself is not calibrated: only the router that needs no data is there.
        merged_here = self.bundle.resolve().is_relative_to(self.cache.resolve())
        return {"router": "projection" if merged_here else None, **self.where}

    @contextmanager
    def answering(self) -> Iterator[EngineModel]:
        """The bundle as the workers of the engine load it."""
        assert self.engine is not None, "nobody else answers"
        folder = self.cache / f"{self.bundle_identity[:16]}.parts"
        with EngineModel.opened(self.bundle, self.engine, folder, loading=self._loading) as model:
            yield model

    @property
    def where(self) -> dict[str, Any]:
        """Where models run."""
        return {"device": self.settings.device, "dtype": self.settings.dtype}

    def with_options(
        self, *, router: Mapping[str, Any] | None = None, answer: Mapping[str, Any] | None = None
    ) -> Model:
        """The loaded bundle as if its recipe said so, for options that are read with every answer.

        Args:
            router: how many tasks are selected (`threshold`, `top_k`).
            answer: how a set is merged (`merge`) and heads are compared (`score`, `weight`).
        """
        core, stages, sets = self.model.core, self.model.stages, self.model.sets
        options = core.options.model_copy(update=dict(answer or {}))
        stages = replace(stages, options=stages.options.model_copy(update=dict(router or {})))
        return Model(replace(core, options=options), stages, sets.merged_by(options.merge))

    def row(self, sample: Sample) -> Row:
        """A sample's input as tensors.

        Raises:
            InputError: it cannot be read; its name is said.
        """
        try:
            return self.model.read(self.input(sample))
        except InputError as error:
            name = self.ready.data[sample.task].names[sample.place]
            text = str(error)
            raise InputError(text if text.startswith(name) else f"{name}: {text}") from None

    # The recipe

    @cached_property
    def sources(self) -> OpenedRecipe:
        """Base and experts, as methods that are no bundle take them."""
        return open_sources(self.recipe, self.recipe_folder, **self.where)

    @property
    def recipe(self) -> Recipe:
        """The recipe.

        Raises:
            InputError: none was given.
        """
        return self._given_recipe()[0]

    @property
    def recipe_folder(self) -> Path:
        """What the recipe's relative paths start from."""
        return self._given_recipe()[1]

    @property
    def has_recipe(self) -> bool:
        """Whether the experts are known."""
        return self._recipe is not None

    def _given_recipe(self) -> tuple[Recipe, Path]:
        if self._recipe is None:
            raise InputError("this study reads the experts. Name them: --recipe recipe.yaml.")
        return self._recipe

    def merged(self, recipe: Recipe) -> Path:
        """The bundle (or with a static method the checkpoint) of a recipe, made once and kept in the study's cache."""
        name = checksum([massmerge.__version__, recipe.dump(), str(self.recipe_folder.resolve())])[:16]
        target = self.cache / "bundles" / name
        if not (target / MANIFEST).is_file():
            self.tell(f"merging {len(recipe.tasks)} tasks into {target}")
        where: dict[str, Any] = {"folder": self.recipe_folder, "device": self.settings.device, "engine": self.engine}
        try:
            return merge(recipe, target, **where)
        except InputError:
            if not target.exists():
                raise
            # The experts have changed since.
            return merge(recipe, target, overwrite=True, **where)

    @cached_property
    def experts(self) -> Experts:
        """The experts that the bundle was made from, opened but not read."""
        return open_experts(Bundle(self.bundle, check=False), self.recipe_folder, **self.where)

    # Cells

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What every cell depends on: bundle, rows and version."""
        return {
            "version": massmerge.__version__,
            "bundle": self.bundle_identity,
            "data": {task: data.sha256() for task, data in self.ready.data.items()},
            **({"generate": self.generation} if self.ready.writes else {}),
            **({} if set(self.where.values()) == {"auto"} else self.where),
        }

    @cached_property
    def bundle_identity(self) -> str:
        """Checksum of what the bundle's manifest says, which holds those of its files."""
        return checksum(Bundle(self.bundle, check=False).manifest)

    def key(self, name: str, about: Mapping[str, Any]) -> str:
        """The checksum under which a cell is kept."""
        return checksum([name, dict(about), self.identity])

    def cell(self, name: str, about: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """A value that is computed once: from an earlier run if that had the same bundle, rows and options.

        Args:
            name: what it is.
            about: everything it depends on beside bundle and rows, as plain data.
            compute: gives the value as plain data.
        """
        key = self.key(name, about)
        if key in self.cells:
            return self.cells[key]
        began = time.perf_counter()
        return self.cells.put(key, compute(), time.perf_counter() - began)

    # Figures

    @cached_property
    def references(self) -> dict[str, float]:
        """The experts' own figures: measured on the same rows if the recipe is there, else those of the suite."""
        if self.has_recipe:
            return {task: self._expert_figure(task) for task in self.measured}
        split = None if self.settings.split == DEFAULT_SPLIT else self.settings.split
        found = {task: self.ready.suite.tasks[task].reference_of(split) for task in self.measured}
        return {task: value for task, value in found.items() if value is not None}

    def _expert_figure(self, task: str) -> float:
        data = self.ready.data[task]
        answers = expert_answers(
            self.experts, data, batch_size=self.settings.batch_size, keep=self.cache / "experts",
            generate=self.generation if self.ready.writes else None, progress=self.progress,
        )  # fmt: skip
        return self.figure(task, answers)

    def figure(self, task: str, answers: Iterable[Given]) -> float:
        """The metric of a task over the answers to its rows, in their order; shared labels count as right."""
        about, data = self.ready.suite.tasks[task], self.ready.data[task]
        of = statistic(about.metric, task, data.labels, list(answers), shared_groups(self.ready.shared), about.positive)
        return of(torch.arange(len(data)).numpy())

    # Time

    @cached_property
    def forward_seconds(self) -> float:
        """About how long one input takes through the base."""
        step = max(1, len(self.samples) // _TIMED)
        rows = [self.row(sample) for sample in self.samples[::step][:_TIMED]]
        core = self.model.core
        call = core.call(core.batch(rows))
        with torch.inference_mode():
            core.base(**call)
            began = time.perf_counter()
            core.base(**call)
        return (time.perf_counter() - began) / len(rows)

    @cached_property
    def merge_seconds(self) -> float:
        """About how long a merge of the recipe takes."""
        return open_recipe(*self._given_recipe(), download=True).plan.seconds

    def seconds_for(self, forwards: float) -> float:
        """About how long so many forward passes of every sample take."""
        return forwards * len(self.samples) * self.forward_seconds
