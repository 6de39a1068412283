"""Shortens the factors of a bundle that something was added to, so that it keeps its budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from massmerge.bundle.encoding import PARTS, SMALL_SIDE
from massmerge.bundle.layout import FIXED, STATISTICS, factors_name, holds_tensors
from massmerge.bundle.manifest import sign_manifest
from massmerge.bundle.reader import Bundle
from massmerge.io.checksums import file_sha256, xxh128_of
from massmerge.io.durable import drafted
from massmerge.io.tensor_file import TensorInfo, read_tensor, tensor_bytes, write_stream, write_tensors

MOST = 0.1
"""The share of singular vectors that is given up at most; a bundle whose budget asks for more keeps them all."""
_SLACK = 512  # bytes by which the manifest may grow
_STEPS = 1000


def keep_budget(folder: Path) -> float:
    """Drop the smallest singular vectors of all tasks alike until a bundle weighs what its recipe allows.

    Args:
        folder: the bundle. Files that change are replaced, so that other links to them stay as they are.

    Returns:
        The share of vectors that was dropped; 0 where the bundle is small enough, has no budget, keeps a fixed model, whose
        cores belong to all vectors, or would need to give up too much.
    """
    bundle = Bundle(folder, check=False)
    budget = bundle.recipe.merge.budget
    if budget is None or FIXED in bundle.manifest["files"]:
        return 0.0
    return drop_bytes(bundle, bundle.counted_bytes - int(budget * bundle.base_bytes))


def drop_bytes(bundle: Bundle, excess: int) -> float:
    """The same for a bundle that is so many bytes too large."""
    if excess <= 0:
        return 0.0
    vectors = {task.name: list(_vectors(bundle.headers[task.name])) for task in bundle.tasks}
    for step in range(1, int(MOST * _STEPS) + 1):
        share = step / _STEPS
        saved = sum((k - _left(k, share)) * size for own in vectors.values() for _, k, size in own)
        if saved >= excess + _SLACK:
            _write(bundle, {task: {name: _left(k, share) for name, k, _ in own} for task, own in vectors.items()})
            ranks = [k for own in vectors.values() for _, k, _ in own]
            return 1 - sum(_left(k, share) for k in ranks) / sum(ranks)
    return 0.0


def _left(rank: int, share: float) -> int:
    return max(1, round(rank * (1 - share)))


def _vectors(infos: Mapping[str, TensorInfo]) -> Iterator[tuple[str, int, int]]:
    """Every matrix with factors, but for small ones; its rank, and the bytes of one singular vector on both sides."""
    for name, info in infos.items():
        tensor, _, part = name.rpartition(".")
        if part != "s" or not info.shape[0]:
            continue
        parts = [infos[f"{tensor}.{p}"] for p in PARTS if f"{tensor}.{p}" in infos]
        if min(infos[f"{tensor}.u"].shape[0], infos[f"{tensor}.v"].shape[1]) > SMALL_SIDE:
            yield tensor, info.shape[0], sum(one.nbytes for one in parts) // info.shape[0]


def _write(bundle: Bundle, ranks: Mapping[str, Mapping[str, int]]) -> None:
    """The bundle with factors of these ranks, its statistics and its manifest."""
    manifest, folder = dict(bundle.manifest), bundle.path
    places = {name: row for row, name in enumerate(manifest["ranks"])}
    known = {name: list(own) for name, own in manifest["ranks"].items()}
    statistics = {name: tensor.clone() for name, tensor in bundle.statistics.items()}
    entries: dict[str, Any] = {}
    for position, task in enumerate(bundle.tasks):
        infos, left = bundle.headers[task.name], ranks[task.name]
        for tensor, k in left.items():
            row, s = places[tensor], read_tensor(infos[f"{tensor}.s"]).double()
            norm = float(statistics["norm"][row, position])
            if norm > 0:
                statistics["energy"][row, position] -= float(s[k:].square().sum()) / norm**2
            known[tensor][position] = k
        name = factors_name(task.name)
        _shorten(folder / name, infos, left)
        entries[name] = _entry(folder, name)
    statistics["energy"].clamp_(min=0)
    with drafted(folder / STATISTICS) as draft:
        write_tensors(draft, statistics)
    entries[STATISTICS] = _entry(folder, STATISTICS)
    sign_manifest(folder, {**manifest, "ranks": known, "files": {**manifest["files"], **entries}})


def _shorten(path: Path, infos: Mapping[str, TensorInfo], ranks: Mapping[str, int]) -> None:
    """A file of factors with so many vectors of each matrix, one tensor after the other."""

    def cut(name: str) -> Tensor:
        """A tensor with as many vectors as its matrix keeps."""
        tensor, _, part = name.rpartition(".")
        found = read_tensor(infos[name])
        if part not in PARTS or tensor not in ranks:
            return found
        k = ranks[tensor]
        return (found[:k] if part in ("s", "v") else found[:, :k]).contiguous()

    def shape(name: str) -> tuple[int, ...]:
        """The shape of a tensor that is cut."""
        tensor, _, part = name.rpartition(".")
        old, k = infos[name].shape, ranks.get(tensor)
        if k is None or part not in PARTS:
            return old
        return (k, *old[1:]) if part in ("s", "v") else (old[0], k)

    with drafted(path) as draft:
        shorter = {name: TensorInfo(shape(name), info.dtype) for name, info in infos.items()}
        write_stream(draft, shorter, (tensor_bytes(cut(name)) for name in infos))


def _entry(folder: Path, name: str) -> dict[str, Any]:
    """What the manifest says of a file."""
    path = folder / name
    found: dict[str, Any] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    if holds_tensors(name):
        with path.open("rb") as file:
            found["xxh128"] = xxh128_of(file)
    return found
