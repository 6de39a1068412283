"""Carries a plan out: one tensor at a time, all tasks of it, into parts; then the parts into a bundle."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

import massmerge
from massmerge.bundle.base import base_sha256
from massmerge.bundle.encoding import decode, encode, stored_type
from massmerge.bundle.layout import PROCESSOR
from massmerge.bundle.merge_folder import MergeFolder, recover, refuse_target
from massmerge.checkpoints.expert_tensors import difference
from massmerge.errors import InputError, MassError, Problem, problems_error
from massmerge.io.allocator import mapped_buffers
from massmerge.linalg.factors import Factors, accept_distinct, core_matrix, cosine_matrix, similarity
from massmerge.merging.findings import findings
from massmerge.merging.heads.sources import named_files
from massmerge.merging.open_recipe import OpenedRecipe, open_recipe, recipe_and_folder
from massmerge.merging.originals import Originals
from massmerge.merging.plan import TensorPlan
from massmerge.merging.static.parts import StaticParts
from massmerge.merging.static.write import assemble_checkpoint, assemble_checkpoints
from massmerge.merging.write import assemble_bundle
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
    overwrite: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
    planned: Callable[[OpenedRecipe], None] = lambda prepared: None,
) -> Path:
    """Build a bundle, or with a static method an ordinary checkpoint.

    The same recipe gives the same bytes, whatever the number of workers; an interrupted merge resumes when it is run again.

    Args:
        recipe: a recipe, or the path of one.
        out: the folder to write.
        folder: what relative paths in the recipe start from; the recipe's own folder if a path is given.
        workers: tensors that are worked on at the same time, each by one core; all cores by default.
        overwrite: replace an existing bundle. Anything else is never replaced.
        strict: treat warnings as errors.
        progress: called as the work advances.
        planned: is called with the plan before any work.

    Returns:
        The folder that was written.

    Raises:
        InputError: recipe or sources are wrong; nothing was written.
        MassError: the work failed.
    """
    recipe, folder = recipe_and_folder(recipe, folder)
    workers = workers_or_all(workers)
    prepared = open_recipe(recipe, folder, download=True, workers=workers)
    return carry_out(
        prepared, out, workers=workers, overwrite=overwrite, strict=strict, progress=progress, planned=planned
    )


def workers_or_all(workers: int | None) -> int:
    """How many tensors are worked on at the same time."""
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, not {workers}.")
    return workers or os.cpu_count() or 1


def carry_out(
    prepared: OpenedRecipe,
    out: str | Path | None,
    *,
    workers: int,
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
    fingerprint = _fingerprint(prepared, workers)
    work = MergeFolder(target, fingerprint)
    if refuse_target(target, fingerprint, overwrite=overwrite):
        progress.phase(f"{target} is already complete: nothing to do")
        return target
    _refuse_full_disk(target, prepared)
    with work.opened(), mapped_buffers(), _tidy(prepared, work):
        refuse_target(target, fingerprint, overwrite=overwrite)  # another merge may have published meanwhile
        _refuse_changed(prepared, work)
        _tell_damaged(prepared, work, progress)
        _Run(prepared, work, progress).run(workers)
        _tell(findings(prepared, work), progress, strict=strict)
        progress.phase("writing …")
        prepared.files.settled(lambda: _assemble(prepared, work, fingerprint))
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
    own = prepared.bundled.bundle.path.resolve() if prepared.bundled else None
    target = own if out is None else Path(out).resolve()
    assert target is not None, "only a bundle can be changed in place"
    if own in target.parents:
        raise InputError(f"{target}: is inside the bundle. Choose another target.")
    return target, overwrite or target == own


def _assemble(prepared: OpenedRecipe, work: MergeFolder, fingerprint: str) -> None:
    work.fresh_result()
    if not prepared.recipe.merge.static:
        assemble_bundle(prepared, work, fingerprint)
    elif prepared.recipe.merge.keeps_tasks:
        assemble_checkpoints(prepared, work, fingerprint)
    else:
        assemble_checkpoint(prepared, work, fingerprint)


class _Run:
    """The tensors of one merge."""

    def __init__(self, prepared: OpenedRecipe, work: MergeFolder, progress: Progress) -> None:
        self.prepared, self.work, self.progress = prepared, work, progress
        self.originals = Originals(prepared)
        self.order = self.originals.tasks
        self.static = StaticParts(prepared) if prepared.recipe.merge.static else None

    def run(self, workers: int) -> None:
        """Finish every tensor, the largest first so that no worker is left with it at the end."""
        tensors = list(enumerate(self.prepared.plan.tensors))
        todo = [(i, t) for i, t in tensors if not self.work.finished(i)]
        with _one_thread_each(), ThreadPoolExecutor(workers, initializer=lambda: torch.set_num_threads(1)) as pool:
            if todo and self.static is not None and self.static.looks:
                self.progress.phase("scanning all tensors first …")
                self.progress.start(self.static.looks, 0)
                self.prepared.files.settled(partial(self.static.look, pool, workers, self.progress.tensor))
            self.progress.start(len(tensors), len(tensors) - len(todo))
            futures = [pool.submit(self._finish, i, t) for i, t in sorted(todo, key=lambda x: (-x[1].nbytes, x[0]))]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

    def _finish(self, index: int, tensor: TensorPlan) -> None:
        self.work.finish(index, self.prepared.files.settled(lambda: self._part(tensor)))
        self.progress.tensor(tensor.name)

    def _part(self, tensor: TensorPlan) -> dict[str, Tensor]:
        given = {i: t for i, t in enumerate(self.order) if tensor.ranks[i]}
        if self.static is not None:
            part = self.static.part(tensor)
        else:
            part = self._whole(tensor, given) if tensor.matrix is None else self._factored(tensor, given)
        self._refuse_overflow(tensor, part)
        return part

    def _refuse_overflow(self, tensor: TensorPlan, part: dict[str, Tensor]) -> None:
        """Refuse what the sources' numbers, each of them finite, became: products and sums too large for their type."""
        if all(bool(t.isfinite().all()) for t in part.values() if t.is_floating_point()):
            return
        large = [task for task, norm in zip(self.order, part["norm"].tolist(), strict=True) if not math.isfinite(norm)]
        raise InputError(
            f"{tensor.name}: the delta of {', '.join(large or self.order)} is too large for {tensor.dtype}: the "
            "result is not finite. Fine-tune or save the expert again, or leave the task out."
        )

    def _factored(self, tensor: TensorPlan, given: dict[int, str]) -> dict[str, Tensor]:
        """Factors of every task, and what is known of them together."""
        base = cache(partial(self.originals.base, tensor.name))  # adapters know their deltas without it
        found = {i: self.originals.kept(tensor, task, base) for i, task in given.items()}
        kept = {i: one for i, one in found.items() if one is not None}
        assert tensor.matrix is not None
        dtype = stored_type(self.prepared.recipe.merge.factors, getattr(torch, tensor.dtype), tensor.matrix)
        stored = {i: encode(one.factors, dtype) for i, one in kept.items()}
        part = {f"{i}.{name}": tensor for i, parts in stored.items() for name, tensor in parts.items()}
        count = len(self.order)
        norm, energy, cosine = torch.zeros(count), torch.ones(count), torch.zeros(count, count)
        accepted = torch.zeros(count, dtype=torch.uint8)
        if kept:
            positions = list(kept)
            factors = [one.factors for one in kept.values()]
            norm[positions] = torch.tensor([one.norm for one in kept.values()])
            energy[positions] = torch.tensor([one.energy for one in kept.values()])
            similar = cosine_matrix(factors)
            cosine[torch.tensor(positions)[:, None], torch.tensor(positions)] = similar.float()
            chosen = self._distinct(factors, similar)
            accepted[[positions[j] for j in chosen]] = 1
            if self.prepared.recipe.router.first_pass == "fixed":
                # The core undoes what bases have in common, so it belongs to the factors that it will be multiplied with.
                part["core"] = self._core([decode(stored[positions[j]]) for j in chosen])
        return part | {"norm": norm, "energy": energy, "cosine": cosine, "accepted": accepted}

    def _distinct(self, factors: list[Factors], cosine: Tensor) -> list[int]:
        """Positions of the tasks that the fixed model is made of, in order."""
        redundancy = self.prepared.recipe.merge.redundancy
        if isinstance(redundancy, str):
            return list(range(len(factors)))
        alike = cosine if redundancy.metric == "cosine" else similarity(factors, redundancy.metric)
        return accept_distinct(alike, redundancy.threshold)

    def _core(self, factors: list[Factors]) -> Tensor:
        """The fixed model's core: float32, or float64 where rounding would show and no budget counts the bytes."""
        core = core_matrix(factors, torch.float64)
        size = torch.cat([f.s for f in factors]).norm()
        rounds = core.norm() * torch.finfo(torch.float32).eps > 1e-5 * size
        return core if rounds and self.prepared.recipe.merge.budget is None else core.float()

    def _whole(self, tensor: TensorPlan, given: dict[int, str]) -> dict[str, Tensor]:
        """The experts' own values where they differ from the base."""
        base = self.originals.base(tensor.name)
        part = {"norm": torch.zeros(len(self.order))}
        for i, task in given.items():
            value = self.originals.whole(tensor, task, base)
            part["norm"][i] = float(difference(base, value).double().norm())
            if part["norm"][i] > 0 or not tensor.in_base:
                part[f"{i}.whole"] = value.to(base.dtype).contiguous()
        return part


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """One thread for every library below: sums then have one order, and bytes do not depend on the number of workers."""
    before = torch.get_num_threads()
    try:
        with threadpool_limits(1):
            torch.set_num_threads(1)
            yield
    finally:
        torch.set_num_threads(before)


def _fingerprint(prepared: OpenedRecipe, workers: int) -> str:
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
    files |= {text: prepared.folder / Path(text).expanduser() for text in named_files(prepared.opened)}
    sums = dict(zip(files, prepared.files.sums(files.values(), workers), strict=True))
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
    for index in work.damaged:
        name = prepared.plan.tensors[index].name
        progress.warning(Problem(name, "its saved part is damaged; it is computed again.", "warning"))


def _tell(problems: list[Problem], progress: Progress, *, strict: bool) -> None:
    if problems and strict:
        raise problems_error(problems)
    for problem in problems:
        progress.warning(problem)
