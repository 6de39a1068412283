"""Fits the routers that need a few unlabelled inputs a task, and keeps them in the bundle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from massmerge.bundle.layout import LEFT_OVER, MANIFEST, ROUTER
from massmerge.bundle.manifest import read_manifest, sign_manifest
from massmerge.bundle.merge_folder import recover
from massmerge.bundle.watched_files import SourceFiles
from massmerge.bundle.work_folder import WorkFolder, in_words
from massmerge.errors import InputError
from massmerge.io.checksums import file_sha256
from massmerge.io.durable import link_tree
from massmerge.io.tensor_file import read_tensors, write_tensors
from massmerge.model.model import Model, load
from massmerge.model.route.first_pass import FirstPass
from massmerge.routing.mlp import fit_mlp
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.prototype import SHARE, SHARE_ALIKE, fit_prototypes

Kind = Literal["prototype", "nearest", "mlp"]


def calibrate(
    path: str | Path, inputs: Mapping[str, Iterable[Any]], *, kind: Kind = "prototype", count: int = 16
) -> dict[str, int]:
    """Fit a router on inputs of each task and make it the bundle's.

    Args:
        path: the bundle. It is replaced as a whole by one with the router; all other files stay what they are.
        inputs: for each task some inputs of it; they need no labels.
        kind: `prototype` keeps the mean activation and counts it together with the subspaces, `nearest` keeps all of them,
            `mlp` trains a network on them.
        count: how many inputs of each task are used at most.

    Returns:
        How many inputs of each task were used.

    Raises:
        InputError: a task is unknown or has no inputs, or one of them cannot be read.
        MassError: another command is writing the bundle, it has changed meanwhile, or the disk is full.
    """
    path = Path(path)
    recover(path)
    read_manifest(path)  # what is no bundle gets no folder beside it
    work = WorkFolder(path)
    with in_words(work.path), work.held():
        try:
            files = SourceFiles.of_bundle(path)
            used, fitted = _fit(path, files, inputs, kind, count)
            _write(path, work.fresh_result(), kind, fitted)
            work.publish(replacing=True)
        finally:
            work.discard()
    return used


def _fit(
    path: Path, files: SourceFiles, inputs: Mapping[str, Iterable[Any]], kind: Kind, count: int
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """How many inputs of each task were used, and the tensors of the router that was fitted on them."""
    model = load(path, router="projection", check=True)
    unknown = [name for name in inputs if name not in model.tasks]
    if unknown:
        raise InputError(f"no task {', '.join(map(repr, unknown))}. There are {', '.join(model.tasks)}.")
    chosen = {task: list(islice(inputs.get(task, ()), count)) for task in model.tasks}
    empty = [task for task, items in chosen.items() if not items]
    if empty:
        raise InputError(f"no inputs for {', '.join(empty)}. Every task needs some; a dozen is enough.")
    fitted = files.settled(lambda: _fitted(model, chosen, kind))
    return {task: len(items) for task, items in chosen.items()}, fitted


def _fitted(model: Model, chosen: dict[str, list[Any]], kind: Kind) -> dict[str, Tensor]:
    owners = torch.tensor([t for t, items in enumerate(chosen.values()) for _ in items])
    fitted: dict[str, Tensor] = {}
    for first_pass, routers in _looks(model, kind):
        activations = _activations(model, first_pass, chosen)
        for voter, z, residuals in zip(first_pass.voters, activations, routers, strict=True):
            for name, tensor in fit_router(kind, z, owners, residuals).items():
                fitted[f"{kind}.{voter.name}.{name}"] = tensor
    return fitted


def _write(path: Path, result: Path, kind: Kind, fitted: dict[str, Tensor]) -> None:
    """The bundle at `path` with the fitted router, in a folder of its own that shares all other files with it."""
    manifest = read_manifest(path)
    kept = {}
    if ROUTER in manifest["files"]:
        kept = {n: t for n, t in read_tensors(path / ROUTER) if not n.startswith(f"{kind}.")}
    link_tree(path, result, leave_out=(MANIFEST, ROUTER, *LEFT_OVER))
    write_tensors(result / ROUTER, {**kept, **fitted})
    entry = {"bytes": (result / ROUTER).stat().st_size, "sha256": file_sha256(result / ROUTER)}
    sign_manifest(result, {**manifest, "router_kind": kind, "files": {**manifest["files"], ROUTER: entry}})


def _looks(model: Model, kind: Kind) -> list[tuple[FirstPass, list[ProjectionRouter]]]:
    """The passes whose voters are fitted: prototypes also those of the closer look, where there is one."""
    runtime = model._runtime
    closer = runtime.closer if kind == "prototype" else None
    looks = [(runtime.first_pass, runtime.routers), *([(closer.first_pass, closer.routers)] if closer else [])]
    return [(one, [router for router in routers if isinstance(router, ProjectionRouter)]) for one, routers in looks]


def _activations(model: Model, first_pass: FirstPass, chosen: dict[str, list[Any]]) -> list[Tensor]:
    """What each voter of a pass sees of the inputs (n, width), in their order."""
    found: list[list[Tensor]] = []
    for task, items in chosen.items():
        try:
            found.append(model.activations(items, first_pass=first_pass))
        except InputError as error:
            raise InputError(f"inputs of {task}: {error}") from None
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def fit_router(kind: Kind, z: Tensor, owners: Tensor, residuals: ProjectionRouter) -> dict[str, Tensor]:
    """The tensors of a router that is fitted on activations `z (n, d)` of the tasks `owners (n,)`."""
    tasks = len(residuals.ranks)
    if kind == "prototype":
        return fit_prototypes(z, owners, tasks, residuals, SHARE_ALIKE if residuals.alike else SHARE)
    if kind == "nearest":
        return {"support": z, "owners": owners}
    return {f"net.{name}": tensor for name, tensor in fit_mlp(z, owners, tasks).items()}
