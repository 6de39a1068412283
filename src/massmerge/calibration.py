"""Fits the routers that need a few unlabelled inputs a task, and keeps them in the bundle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from massmerge.bundle import ROUTER, add_file, read_manifest
from massmerge.errors import InputError
from massmerge.model import Model, load
from massmerge.routing.mlp import fit_mlp
from massmerge.routing.prototype import fit_prototypes
from massmerge.tensorfile import read_tensors, write_tensors

Kind = Literal["prototype", "nearest", "mlp"]


def calibrate(
    path: str | Path, inputs: Mapping[str, Iterable[Any]], *, kind: Kind = "prototype", count: int = 16
) -> dict[str, int]:
    """Fit a router on inputs of each task and make it the bundle's.

    Args:
        path: the bundle; its router and manifest are changed.
        inputs: for each task some inputs of it; they need no labels.
        kind: `prototype` keeps the mean activation, `nearest` all of them, `mlp` trains a network on them.
        count: how many inputs of each task are used at most.

    Returns:
        How many inputs of each task were used.

    Raises:
        InputError: a task is unknown or has no inputs, or one of them cannot be read.
    """
    path = Path(path)
    model = load(path, router="projection", check=True)
    unknown = [name for name in inputs if name not in model.tasks]
    if unknown:
        raise InputError(f"no task {', '.join(map(repr, unknown))}. There are {', '.join(model.tasks)}.")
    chosen = {task: list(islice(inputs.get(task, ()), count)) for task in model.tasks}
    empty = [task for task, items in chosen.items() if not items]
    if empty:
        raise InputError(f"no inputs for {', '.join(empty)}. Every task needs some; a dozen is enough.")
    activations, owners = _activations(model, chosen)
    fitted: dict[str, Tensor] = {}
    for voter, z in zip(model.voters, activations, strict=True):
        for name, tensor in fit_router(kind, z, owners, len(model.tasks)).items():
            fitted[f"{kind}.{voter}.{name}"] = tensor
    kept = {}
    if ROUTER in read_manifest(path)["files"]:
        kept = {n: t for n, t in read_tensors(path / ROUTER) if not n.startswith(f"{kind}.")}
    draft = path / f".{ROUTER}.draft"
    write_tensors(draft, {**kept, **fitted})
    add_file(path, draft, ROUTER, {"router_kind": kind})
    return {task: len(items) for task, items in chosen.items()}


def _activations(model: Model, chosen: dict[str, list[Any]]) -> tuple[list[Tensor], Tensor]:
    found: list[list[Tensor]] = []
    owners: list[int] = []
    for position, (task, items) in enumerate(chosen.items()):
        try:
            found.append(model.activations(items))
        except InputError as error:
            raise InputError(f"inputs of {task}: {error}") from None
        owners += [position] * len(items)
    return [torch.cat(parts) for parts in zip(*found, strict=True)], torch.tensor(owners)


def fit_router(kind: Kind, z: Tensor, owners: Tensor, tasks: int) -> dict[str, Tensor]:
    """The tensors of a router that is fitted on activations `z (n, d)` of the tasks `owners (n,)`."""
    if kind == "prototype":
        return fit_prototypes(z, owners, tasks)
    if kind == "nearest":
        return {"support": z, "owners": owners}
    return {f"net.{name}": tensor for name, tensor in fit_mlp(z, owners, tasks).items()}
