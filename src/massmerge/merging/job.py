"""A merge as other machines are told it: recipe, plan, and how to know that they see the same sources."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from massmerge.bundle.merge_folder import MergeFolder
from massmerge.bundle.parts import Parts
from massmerge.bundle.reader import Bundle
from massmerge.bundle.watched_files import SeenFile, SourceFiles
from massmerge.engines.job import EngineJob, one_thread_each
from massmerge.errors import InputError
from massmerge.io.allocator import mapped_buffers
from massmerge.merging.from_bundle import Bundled
from massmerge.merging.open_recipe import OpenedRecipe, open_recipe
from massmerge.merging.plan import Plan
from massmerge.merging.worker import MergeWorker
from massmerge.recipe import Recipe


@dataclass(frozen=True)
class MergeJob(EngineJob):
    """The description of a merge. Its own process keeps what it has opened; others open it from the description."""

    recipe: Recipe
    folder: Path
    plan: Plan
    fingerprint: str
    parts: Path
    result: Path
    files: tuple[SeenFile, ...]
    bundle: Path | None
    taken: tuple[str, ...]
    prepared: OpenedRecipe | None = field(default=None, compare=False)

    @classmethod
    def of(cls, prepared: OpenedRecipe, work: MergeFolder, fingerprint: str) -> MergeJob:
        """The job of a merge whose work folder is held."""
        bundled = prepared.bundled
        return cls(
            prepared.recipe,
            prepared.folder.resolve(),
            prepared.plan,
            fingerprint,
            work.parts.folder,
            work.result,
            prepared.files.seen(),
            bundled.bundle.path.resolve() if bundled else None,
            tuple(task.name for task in bundled.tasks) if bundled else (),
            prepared,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, ({**self.__dict__, "prepared": None},)

    @property
    def name(self) -> str:
        """What is merged, by its target."""
        return f"merge into {self.result.parent}"

    @property
    def store(self) -> Path:
        """The folder of the parts."""
        return self.parts

    def open(self) -> MergeWorker:
        """What was opened already, or all sources of the recipe, which must be those that it was planned with."""
        prepared = self.prepared or self._opened()
        return MergeWorker(prepared, Parts(self.parts, self.fingerprint), self.result)

    def _opened(self) -> OpenedRecipe:
        bundled = None
        if self.bundle is not None:
            bundled = Bundled(Bundle(self.bundle), SourceFiles.of_bundle(self.bundle), self.taken)
        prepared = open_recipe(self.recipe, self.folder, download=True, bundled=bundled, plan=self.plan)
        prepared.files.refuse_others(self.files)
        revisions = {task.name: task.revision for task in self.plan.tasks}
        other = [name for name, expert in prepared.experts.items() if expert.source.revision != revisions[name]]
        if other or prepared.base.source.revision != self.plan.base_revision:
            raise InputError(
                f"{', '.join(other) or 'base'}: its hub or store has another revision now. Run the command again."
            )
        return prepared

    @contextmanager
    def around(self) -> Iterator[None]:
        """One thread, and buffers that go back to the system."""
        with one_thread_each(), mapped_buffers():
            yield


def _unpickled(state: dict[str, object]) -> MergeJob:
    return MergeJob(**state)  # type: ignore[arg-type]
