"""Carries a plan out: its units into parts, by an engine; then the parts into a bundle."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import massmerge
from massmerge.bundle.base import base_sha256
from massmerge.bundle.layout import PROCESSOR
from massmerge.bundle.manifest import FileEntry
from massmerge.bundle.merge_folder import MergeFolder, recover, refuse_target
from massmerge.bundle.parts import tensor_key
from massmerge.bundle.stored import published
from massmerge.engines.choose import opened_engine
from massmerge.engines.job import Engine
from massmerge.engines.local import LocalEngine
from massmerge.engines.unit import Unit
from massmerge.errors import InputError, MassError, Problem, problems_error
from massmerge.io.addresses import is_address
from massmerge.io.placement import Placement
from massmerge.io.remote_cache import path_of
from massmerge.io.tensor_file import read_tensor
from massmerge.merging.findings import findings
from massmerge.merging.heads.sources import named_files
from massmerge.merging.job import MergeJob
from massmerge.merging.open_recipe import OpenedRecipe, open_recipe, recipe_and_folder
from massmerge.merging.static.parts import StaticParts
from massmerge.merging.static.write import assemble_checkpoint, assemble_checkpoints, checkpoint_files
from massmerge.merging.units import MakeShare, file_units, look_units, part_units
from massmerge.merging.write import assemble_bundle, bundle_files
from massmerge.recipe import Recipe


class Progress(Protocol):
    """Hears how a merge advances."""

    def start(self, total: int, done: int) -> None:
        """There are `total` tensors, `done` of which an earlier run finished."""

    def tensor(self, name: str) -> None:
        """A tensor is finished."""

    def phase(self, name: str) -> None:
        """What follows the tensors has begun."""

    def warning(self, problem: Problem) -> None:
        """Something was found that a person should know."""


class Silent:
    """Progress that is not shown."""

    def start(self, total: int, done: int) -> None:
        """Nothing."""

    def tensor(self, name: str) -> None:
        """Nothing."""

    def phase(self, name: str) -> None:
        """Nothing."""

    def warning(self, problem: Problem) -> None:
        """Nothing."""


def merge(
    recipe: Recipe | str | Path,
    out: str | Path,
    *,
    folder: str | Path | None = None,
    workers: int | None = None,
    engine: str | Engine | None = None,
    overwrite: bool = False,
    strict: bool = False,
    device: str = "auto",
    progress: Progress | None = None,
    planned: Callable[[OpenedRecipe], None] = lambda prepared: None,
) -> Path:
    """Build a bundle, or with a static method an ordinary checkpoint.

    The same recipe gives the same bytes, whatever the number of workers; an interrupted merge resumes when it is run again.

    Args:
        recipe: a recipe, or the path or address of one.
        out: the folder to write, or the address to publish it at.
        folder: what relative paths in the recipe start from; the recipe's own folder if a path is given.
        workers: tensors that are worked on at the same time, each by one core; all cores by default.
        engine: where the work runs: `local` (threads of this process, the default), `ray`, `ray://host:port`, or an engine.
        overwrite: replace an existing bundle. Anything else is never replaced.
        strict: treat warnings as errors.
        device: where to compute, such as `cpu` or `cuda:1`; a CUDA GPU if there is one by default. Another device rounds
            differently, in the last bits.
        progress: called as the work advances.
        planned: is called with the plan before any work.

    Returns:
        The folder that was written; with an address, that of the copy in the cache.

    Raises:
        InputError: recipe or sources are wrong; nothing was written.
        MassError: the work failed.
    """
    recipe, folder = recipe_and_folder(recipe, folder)
    place = placement_for(engine, device)  # a wrong one is told before the sources are opened
    step = progress.phase if progress else lambda name: None
    with published(out, overwrite=overwrite, step=step) as target, opened_engine(engine, workers) as chosen:
        prepared = open_recipe(recipe, folder, download=True, workers=workers_or_all(workers))
        prepared.place = place
        return carry_out(
            prepared, target, engine=chosen, overwrite=overwrite, strict=strict, progress=progress, planned=planned
        )


def placement_for(engine: str | Engine | None, device: str) -> Placement:
    """Where a merge computes: on a device of this machine, or on the processors of an engine's machines."""
    here = engine is None or engine == "local" or isinstance(engine, LocalEngine)
    if not here and device not in ("auto", "cpu"):
        raise InputError(f"device {device}: workers of an engine compute on their processors. Leave it out.")
    return Placement.exact(device if here else "cpu")


def workers_or_all(workers: int | None) -> int:
    """How many tensors are worked on at the same time."""
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, not {workers}.")
    return workers or os.cpu_count() or 1


def carry_out(
    prepared: OpenedRecipe,
    out: str | Path | None,
    *,
    engine: Engine,
    overwrite: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
    planned: Callable[[OpenedRecipe], None] = lambda prepared: None,
) -> Path:
    """Do what has been planned; see `merge`. With no `out`, the bundle that tasks are taken from is replaced."""
    progress = progress or Silent()
    target, overwrite = _target(prepared, out, overwrite=overwrite)
    recover(target)
    refused = prepared.plan.problems if strict else prepared.plan.errors
    if refused:
        raise problems_error(refused)
    planned(prepared)
    fingerprint = _fingerprint(prepared, engine)
    work = MergeFolder(target, fingerprint)
    if refuse_target(target, fingerprint, overwrite=overwrite):
        progress.phase(f"{target} is already complete: nothing to do")
        return target
    _refuse_full_disk(target, prepared)
    with work.opened(), _tidy(prepared, work):
        refuse_target(target, fingerprint, overwrite=overwrite)  # another merge may have published meanwhile
        _refuse_changed(prepared, work)
        _tell_damaged(prepared, work, progress)
        run = _Run(prepared, work, fingerprint, engine)
        run.tensors(progress)
        _tell(findings(prepared, work.parts), progress, strict=strict)
        progress.phase("writing …")
        run.assemble()
        prepared.files.refuse_changed_remote()
        _refuse_changed(prepared, work)
        work.publish(replacing=overwrite)
    return target


@contextmanager
def _tidy(prepared: OpenedRecipe, work: MergeFolder) -> Iterator[None]:
    """Keep what is finished of a merge that fails, but nothing of one with wrong input."""
    try:
        yield
    except (MassError, OSError) as error:
        if isinstance(error, InputError):
            work.discard()
        _refuse_changed(prepared, work)  # which would explain the fault better
        raise


def _refuse_changed(prepared: OpenedRecipe, work: MergeFolder) -> None:
    """Raise an error if the bundle that tasks are taken from has been replaced: this merge does not fit it."""
    if prepared.bundled is not None and prepared.bundled.changed():
        work.discard()
        raise MassError(
            f"{prepared.bundled.bundle.path}: another command changed it during the run. Run this command again."
        )


def check_target(prepared: OpenedRecipe, out: str | Path | None, *, overwrite: bool) -> None:
    """What `carry_out` would say of its target, for a look ahead.

    Raises:
        InputError: something is there that is not overwritten, or only with `overwrite`.
    """
    target, overwrite = _target(prepared, out, overwrite=overwrite)
    refuse_target(target, "", overwrite=overwrite)


def _target(prepared: OpenedRecipe, out: str | Path | None, *, overwrite: bool) -> tuple[Path, bool]:
    """The folder to write, and whether a bundle that is there is replaced, as one that is changed in place always is."""
    if out is not None and is_address(out):
        raise InputError(f"{out}: write to a folder, then `mass push` it to the address.")
    own = prepared.bundled.bundle.path.resolve() if prepared.bundled else None
    target = own if out is None else Path(out).resolve()
    assert target is not None, "only a bundle can be changed in place"
    if own in target.parents:
        raise InputError(f"{target}: is inside the bundle. Choose another target.")
    return target, overwrite or target == own


class _Run:
    """The units of one merge, handed to an engine."""

    def __init__(self, prepared: OpenedRecipe, work: MergeFolder, fingerprint: str, engine: Engine) -> None:
        self.prepared, self.work, self._fingerprint, self._engine = prepared, work, fingerprint, engine
        self._job = MergeJob.of(prepared, work, fingerprint)

    def tensors(self, progress: Progress) -> None:
        """Finish every tensor."""
        plan, finished = self.prepared.plan, self.work.parts.names
        todo = [tensor for i, tensor in enumerate(plan.tensors) if tensor_key(i) not in finished]
        found = self._look(progress) if todo and self.prepared.recipe.merge.static else {}
        progress.start(len(plan.tensors), len(plan.tensors) - len(todo))

        def done(unit: Unit, made: dict[str, str]) -> None:
            """Note and show the tensors that a unit has finished."""
            if not isinstance(unit.data, MakeShare):
                finished.update(made)
                for key in made:
                    progress.tensor(plan.tensors[int(key)].name)

        self._engine.run(self._job, part_units(plan, finished, found, self._engine.overhead), done)

    def _look(self, progress: Progress) -> dict[str, Any]:
        """What a static method must know of all tensors together; figures are files as parts are."""
        static, plan, parts = StaticParts(self.prepared), self.prepared.plan, self.work.parts
        if static.rounds:
            progress.phase("scanning all tensors first …")
            progress.start(len(static.rounds) * len(static.looked_at), 0)
        found: dict[str, Any] = {}

        def done(unit: Unit, made: dict[str, str]) -> None:
            """Note and show the tensors that a unit has looked at."""
            parts.names.update(made)
            for index in unit.data.indices:
                progress.tensor(plan.tensors[index].name)

        for step in range(len(static.rounds)):
            units = look_units(plan, static.looked_at, step, found)
            for unit in [unit for unit in units if unit.data.key in parts.names]:
                done(unit, {})
            self._engine.run(self._job, [unit for unit in units if unit.data.key not in parts.names], done)
            seen = (parts.header(unit.data.key) for unit in units)
            found = static.conclude(step, ({n: read_tensor(i) for n, i in header.items()} for header in seen))
        return found

    def assemble(self) -> None:
        """Put the result together."""
        prepared, work, static = self.prepared, self.work, self.prepared.recipe.merge.static
        out, known = work.fresh_result(), dict[str, FileEntry]()
        files = checkpoint_files(prepared, work.parts) if static else bundle_files(prepared)
        for file in files:
            (out / file.path).parent.mkdir(parents=True, exist_ok=True)
        names = {tensor_key(i): work.parts.names[tensor_key(i)] for i in range(len(prepared.plan.tensors))}
        units = file_units(files, names)
        self._engine.run(self._job, units, lambda unit, entry: known.__setitem__(unit.data.file.path.as_posix(), entry))
        assemble = assemble_bundle
        if static:
            assemble = assemble_checkpoints if prepared.recipe.merge.keeps_tasks else assemble_checkpoint
        prepared.files.settled(lambda: assemble(prepared, work.parts, out, self._fingerprint, known))


def _fingerprint(prepared: OpenedRecipe, engine: Engine) -> str:
    """What the result depends on: this version, the recipe, and the bytes of its sources (a hub's by its revision).

    Not their times or places: the same experts in another folder give the same bundle, and an expert that was replaced by
    an older one gives another.
    """
    bundled = prepared.bundled
    experts = [prepared.experts[task.name].source for task in prepared.opened]
    sources = experts if bundled else [prepared.base.source, *experts]
    files = {f"{s.text}/{p.name}": p for s in sources if s.revision is None for p in s.files()}
    base = []
    if not prepared.copies_base and not bundled:  # its weights are hardly read: nor are they for this
        weights = {info.path for info in prepared.base.store.infos.values()}
        files, base = {name: path for name, path in files.items() if path not in weights}, [base_sha256(prepared.base)]
    if bundled is None:
        files |= {f"{PROCESSOR}/{name}": path for name, path in prepared.processor.items()}
    files |= {text: path_of(text, prepared.folder) for text in named_files(prepared.opened)}
    sums = dict(zip(files, prepared.files.sums(files.values(), engine), strict=True))
    revisions = {s.text: s.revision for s in sources}
    taken = [bundled.bundle.manifest["sha256"]] if bundled else []  # which knows the bytes of all the bundle's files
    planned = [[tensor.name, *tensor.ranks] for tensor in prepared.plan.tensors]  # parts are numbered by it
    known = [massmerge.__version__, prepared.recipe.dump(), revisions, sums, planned, *taken, *base]
    text = json.dumps(known, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse_full_disk(target: Path, prepared: OpenedRecipe) -> None:
    sizes = prepared.plan.sizes
    needed = sizes.counted + sizes.heads + sizes.factors + sizes.whole + sizes.fixed  # the parts stay until the end
    needed -= 0 if prepared.copies_base else sizes.base
    existing = next(p for p in (target, *target.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise MassError(f"{existing}: the merge needs {needed:,} bytes, the disk has {free:,} left. Free some space.")


def _tell_damaged(prepared: OpenedRecipe, work: MergeFolder, progress: Progress) -> None:
    for key in work.damaged:
        name = prepared.plan.tensors[int(key)].name if key.isdigit() else key
        progress.warning(Problem(name, "its saved part is damaged; it is computed again.", "warning"))


def _tell(problems: list[Problem], progress: Progress, *, strict: bool) -> None:
    if problems and strict:
        raise problems_error(problems)
    for problem in problems:
        progress.warning(problem)
