"""Fits the routers that need a few unlabelled inputs a task, and keeps them in the bundle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massmerge.bundle.download import refuse_hub
from massmerge.bundle.layout import LEFT_OVER, MANIFEST, ROUTER
from massmerge.bundle.manifest import read_manifest, sign_manifest
from massmerge.bundle.merge_folder import recover
from massmerge.bundle.watched_files import SourceFiles
from massmerge.bundle.work_folder import WorkFolder, in_words
from massmerge.errors import InputError
from massmerge.io.checksums import file_sha256
from massmerge.io.durable import link_tree
from massmerge.io.tensor_file import read_tensors, write_tensors
from massmerge.model.load import load
from massmerge.model.model import Model
from massmerge.model.route.first_pass import FirstPass
from massmerge.model.route.voters import subspaces_of
from massmerge.routing.routers import FITTED, find_router


def calibrate(
    path: str | Path, inputs: Mapping[str, Iterable[Any]], *, kind: str = "prototype", count: int = 16
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
        InputError: no router of that kind is fitted, a task is unknown or has no inputs, or one of them cannot be read.
        MassError: another command is writing the bundle, it has changed meanwhile, or the disk is full.
    """
    if kind not in FITTED:
        raise InputError(f"kind is one of {', '.join(FITTED)}, not {kind!r}.")
    refuse_hub(path)
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
    path: Path, files: SourceFiles, inputs: Mapping[str, Iterable[Any]], kind: str, count: int
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """How many inputs of each task were used, and the tensors of the router that was fitted on them."""
    model = load(path, router="projection", check=True)
    model.core.positions(list(inputs) or None)
    chosen = {task: list(islice(inputs.get(task, ()), count)) for task in model.tasks}
    empty = [task for task, items in chosen.items() if not items]
    if empty:
        raise InputError(f"no inputs for {', '.join(empty)}. Every task needs some; a dozen is enough.")
    fitted = files.settled(lambda: _fitted(model, chosen, kind))
    return {task: len(items) for task, items in chosen.items()}, fitted


def _fitted(model: Model, chosen: dict[str, list[Any]], kind: str) -> dict[str, Tensor]:
    owners = torch.tensor([t for t, items in enumerate(chosen.values()) for _ in items])
    fitted: dict[str, Tensor] = {}
    router, stages = find_router(kind), model.stages
    for look in (stages.first, stages.second if router.second_look else None):
        if look is None:
            continue
        subspaces = subspaces_of(look.voters, model.sets.tensors, stages.options.score, look.first_pass)
        activations = _activations(model, look.first_pass, chosen)
        kept = router.fit([voter.name for voter in look.voters], activations, owners, subspaces)
        fitted |= {f"{kind}.{name}": tensor for name, tensor in kept.items()}
    return fitted


def _write(path: Path, result: Path, kind: str, fitted: dict[str, Tensor]) -> None:
    """The bundle at `path` with the fitted router, in a folder of its own that shares all other files with it."""
    manifest = read_manifest(path)
    kept = {}
    if ROUTER in manifest["files"]:
        kept = {n: t for n, t in read_tensors(path / ROUTER) if not n.startswith(f"{kind}.")}
    link_tree(path, result, leave_out=(MANIFEST, ROUTER, *LEFT_OVER))
    write_tensors(result / ROUTER, {**kept, **fitted})
    entry = {"bytes": (result / ROUTER).stat().st_size, "sha256": file_sha256(result / ROUTER)}
    sign_manifest(result, {**manifest, "router_kind": kind, "files": {**manifest["files"], ROUTER: entry}})


def _activations(model: Model, first_pass: FirstPass, chosen: dict[str, list[Any]]) -> list[Tensor]:
    """What each voter of a pass sees of the inputs (n, width), in their order."""
    found: list[list[Tensor]] = []
    for task, items in chosen.items():
        try:
            found.append(model.activations(items, first_pass=first_pass))
        except InputError as error:
            raise InputError(f"inputs of {task}: {error}") from None
    return [torch.cat(parts) for parts in zip(*found, strict=True)]
