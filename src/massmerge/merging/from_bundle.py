"""A bundle as the source of another: its base, and its tasks as experts of it, without the checkpoints they came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from massmerge.bundle.base import referenced_base
from massmerge.bundle.kept_inputs import kept_moments, moment_tensors
from massmerge.bundle.layout import BASE, HEAD, HEADS, TASKS, head_folder
from massmerge.bundle.manifest import read_manifest
from massmerge.bundle.reader import Bundle, BundleTask
from massmerge.bundle.watched_files import SourceFiles
from massmerge.checkpoints import Base, ExpertTensor, HeadParts, Source, find_source
from massmerge.checkpoints.backbone import language_class, load_config
from massmerge.checkpoints.expert_tensors import FullTensor, Kept
from massmerge.checkpoints.skeleton import Kind, build
from massmerge.errors import InputError, Problem
from massmerge.linalg.factors import Factors
from massmerge.merging.heads import HeadSource
from massmerge.recipe import Recipe


@dataclass(frozen=True, eq=False)
class StoredDelta(ExpertTensor):
    """A delta as far as a bundle's factors hold it; norm and energy speak of the expert's whole delta."""

    stored: Kept

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The factors."""
        return self.stored.factors

    def matrix(self, base: Tensor, kind: Kind) -> Tensor:
        """The product of the factors."""
        return self.stored.factors.dense()

    def keep(self, base: Tensor, kind: Kind, rank: int, energy: float | None = None) -> Kept:
        """The factors cut to a rank, which the share of energy was turned into when the task was merged first."""
        squares = self.stored.factors.s.double().square()
        cut = self.stored.factors.first(rank)
        share = self.stored.energy * float(squares[: cut.rank].sum() / squares.sum())
        return Kept(cut, self.stored.norm, share)


@dataclass(frozen=True)
class BundledExpert:
    """A task of a bundle in the place of its expert: what is known of its delta is what the factors hold.

    The best factors of a lower rank are the first columns of those of a higher one, so a task can be cut further as well
    as from the expert itself. It cannot be given a higher rank.
    """

    source: Source
    bundle: Bundle
    task: BundleTask
    head: HeadParts | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def form(self) -> str:
        """What the expert was stored as."""
        return self.task.form

    @cached_property
    def _position(self) -> int:
        return self.bundle.tasks.index(self.task)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """The rank of each matrix that the task changes."""
        return {name: ranks[self._position] for name, ranks in self.bundle.ranks.items() if ranks[self._position]}

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.bundle.ranks)}

    def names(self) -> set[str]:
        """What the task changes, and what it adds to the base."""
        return self.bundle.task_file(self.task.name).names()

    def rank_limit(self, name: str) -> int | None:
        """The rank that the bundle keeps; none for a tensor that it keeps whole."""
        return self._ranks.get(name)

    def read(self, name: str) -> ExpertTensor:
        """The tensor that the task keeps whole, or its delta as far as the factors hold it."""
        found = self.bundle.factors(self.task.name, name)
        if found is None:
            value = self.bundle.whole(self.task.name, name)
            assert value is not None, f"{self.task.name} leaves {name} as it is"
            return FullTensor(value)
        norm, energy = (float(self.bundle.statistics[n][self._rows[name], self._position]) for n in ("norm", "energy"))
        return StoredDelta(Kept(Factors(found.u.float(), found.s, found.v.float()), norm, energy))

    def stored(self, name: str) -> None:
        """Nowhere: a bundle holds factors."""

    @property
    def at_hand(self) -> bool:
        """What is left of the expert is."""
        return True

    def changes(self, name: str, base: Base) -> bool:
        """A bundle holds what its tasks change and nothing else."""
        return True

    def apart_bytes(self, base: int, stored: int) -> int:
        """As many as the base's; of an adapter, as many as are stored of it."""
        return base if self.form == "full" else stored


class Bundled:
    """What a bundle gives a merge in the place of a recipe's sources: base, processor, and some of its tasks.

    Args:
        bundle: the bundle.
        files: its files, watched since before they were read.
        tasks: the tasks that are taken over; all of them by default.
    """

    def __init__(self, bundle: Bundle, files: SourceFiles, tasks: tuple[str, ...] | None = None) -> None:
        self.bundle, self.files = bundle, files
        self.tasks = [task for task in bundle.tasks if tasks is None or task.name in tasks]

    def changed(self) -> bool:
        """Whether the bundle is no longer the one that was opened, so that what is read of it does not fit together."""
        try:
            return bool(read_manifest(self.bundle.path)["sha256"] != self.bundle.manifest["sha256"])
        except InputError:
            return True

    @property
    def names(self) -> set[str]:
        """The tasks that are taken over."""
        return {task.name for task in self.tasks}

    def open_base(self) -> Base:
        """The base, from the bundle or from where it refers to; it is the part that its tasks are versions of."""
        said = self.bundle.manifest["base"]
        inside = Source(said["source"], self.bundle.base_folder, said["revision"])
        config = load_config(inside)
        if not self.bundle.base_weights:
            with suppress(InputError):  # which is told by what opens it
                self.files.watch("base", find_source(said["location"], Path(), download=True))
            return referenced_base(self.bundle, config, check=True)
        skeleton, store = build(config, said["class"]), inside.store()
        return Base(inside, skeleton, store, skeleton.match(store.infos).readings)

    def experts(self) -> dict[str, BundledExpert]:
        """The tasks as experts."""
        return {
            task.name: BundledExpert(Source(task.source, None, task.revision), self.bundle, task) for task in self.tasks
        }

    def heads(self) -> dict[str, HeadSource]:
        """The tasks' heads."""
        return {task.name: self._head(f"{TASKS}/{task.name}", task.head, task.labels) for task in self.tasks}

    def further(self) -> dict[str, dict[str, HeadSource]]:
        """The tasks' further heads."""
        return {
            task.name: {
                name: self._head(f"{TASKS}/{task.name}/{HEADS}/{name}", "linear", labels)
                for name, labels in task.heads.items()
            }
            for task in self.tasks
        }

    def base_head(self, heads: Mapping[str, HeadSource]) -> HeadSource | None:
        """The base's language head, where one of these tasks writes with it.

        Raises:
            InputError: a new task needs it, and the bundle has none, because each of its own tasks has a head.
        """
        without = [name for name, head in heads.items() if head.kind == "none"]
        if not without:
            return None
        config = Source("base", head_folder(self.bundle.base_folder)).json("config.json")
        if config is not None:
            return self._head(BASE, config["architectures"][0], None)
        new = [name for name in without if name not in self.names]
        if new and any(task.head != "none" for task in self.tasks) and self._writes:
            raise InputError(
                f"{', '.join(new)}: has no language head, and the bundle does not keep the base's. Save it with "
                "the adapter (modules_to_save), or merge all experts again."
            )
        return None

    @property
    def _writes(self) -> bool:
        return language_class(load_config(Source("base", self.bundle.base_folder))) is not None

    def processor(self) -> dict[str, Path]:
        """The files of the tokenizer or image processor."""
        return self.bundle.processor_files()

    def moments(self) -> dict[str, Tensor]:
        """What is kept of the inputs that the router was fitted on; nothing where tasks change what the first pass sees."""
        if self.bundle.recipe.router.first_pass == "fixed":
            return {}
        places = [i for i, task in enumerate(self.bundle.tasks) if task.name in self.names]
        return moment_tensors(kept_moments(self.bundle), places)

    def problems(self, recipe: Recipe) -> Iterator[Problem]:
        """What is lost on the way: a fitted router that cannot be fitted again to the tasks of `recipe`."""
        fitted = self.bundle.manifest.get("router_kind")
        if fitted is None:
            return
        new = [task.name for task in recipe.tasks if task.name not in self.names and task.inputs is None]
        kept = bool(self.moments())
        if kept and not new and fitted != "tuned":
            return
        kind = self.bundle.recipe.router.kind
        until = f"routes by {kind} again" if kind == "projection" else "cannot route until it is fitted again"
        said = f"the {fitted} router was fitted to the previous tasks and is dropped: the bundle {until}. "
        if not kept:
            said += "Fit it again with `mass calibrate`."
        elif new:
            said += f"Inputs of {', '.join(new)} suffice to fit one again: `mass calibrate`, or `inputs:` of a task."
        else:
            said = (
                "the tuned router was trained on the previous tasks and is dropped. One that is fitted on the means of its "
                "inputs takes its place; train it again with `mass calibrate --kind tuned`."
            )
        yield Problem("router", said, "warning")

    def _head(self, place: str, kind: str, labels: tuple[str, ...] | None) -> HeadSource:
        own = kind in ("linear", "none")
        nbytes = self.bundle.bytes_of(f"{place}/{HEAD}/model.safetensors")
        return HeadSource(
            kind if own else "shell",  # type: ignore[arg-type]
            None if own else kind,
            labels,
            nbytes,
            folder=head_folder(self.bundle.path / place),
        )
