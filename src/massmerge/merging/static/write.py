"""Puts the parts of a static merge together: an ordinary checkpoint, or one for each task where the task is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from massmerge.bundle.layout import CARD, HEADS, STATIC_RECIPE
from massmerge.bundle.manifest import FileEntry, write_manifest
from massmerge.bundle.parts import Parts, tensor_key
from massmerge.checkpoints.skeleton import from_matrix
from massmerge.io.tensor_file import TensorInfo, read_tensor, tensor_bytes, write_stream
from massmerge.merging.card import checkpoint_card
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.merging.plan import TensorPlan
from massmerge.merging.static import KEEPING_METHODS
from massmerge.merging.static.scales import scale_of
from massmerge.merging.units import LargeFile
from massmerge.merging.write import (
    base_bytes,
    common,
    copy_head,
    copy_processor,
    weight_files,
    write_config,
    write_index,
)


def checkpoint_files(prepared: OpenedRecipe, parts: Parts) -> list[LargeFile]:
    """The weights of the merged model, or of each task's where the method keeps the tasks apart."""
    if prepared.recipe.merge.keeps_tasks:
        headers = _headers(prepared, parts)
        return [
            file
            for i, task in enumerate(prepared.recipe.tasks)
            for file in weight_files(prepared, Path(task.name), _restored_infos(prepared, headers, task.name), i)
        ]
    return weight_files(prepared, Path(), _infos(prepared, _merged(prepared, parts)))


def write_checkpoint_file(prepared: OpenedRecipe, parts: Parts, file: LargeFile, path: Path) -> None:
    """Write weights of one task's model, or with no task some of those of the model that all were merged into."""
    if file.task is not None:
        _write_restored(prepared, _headers(prepared, parts), prepared.recipe.tasks[file.task].name, file.tensors, path)
        return
    merged = _merged(prepared, parts)
    every = _infos(prepared, merged)
    infos = {name: every[name] for name in file.tensors}
    data = (merged[name] if name in merged else base_bytes(prepared, name) for name in infos)
    write_stream(path, infos, data)


def _headers(prepared: OpenedRecipe, parts: Parts) -> dict[TensorPlan, dict[str, TensorInfo]]:
    return {t: parts.header(tensor_key(i)) for i, t in enumerate(prepared.plan.tensors)}


def _merged(prepared: OpenedRecipe, parts: Parts) -> dict[str, TensorInfo]:
    return {t.name: header["merged"] for t, header in _headers(prepared, parts).items()}


def _infos(prepared: OpenedRecipe, merged: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors of the merged model."""
    base = prepared.base
    return {n: merged[n] if n in merged else base.info(n) for n in sorted({*base.slots, *merged})}


def assemble_checkpoint(
    prepared: OpenedRecipe, parts: Parts, out: Path, fingerprint: str, known: Mapping[str, FileEntry]
) -> None:
    """Write what an ordinary Hugging Face folder has besides its weights, the tasks' heads in a folder beside them."""
    write_config(prepared, out)
    copy_processor(prepared, out)
    for task in prepared.recipe.tasks if not prepared.base.writes else ():
        (out / HEADS / task.name).mkdir(parents=True)
        copy_head(prepared, task, out / HEADS / task.name)
    options = prepared.recipe.merge.own()
    scale = {"scale": scale_of(prepared.plan.method, len(prepared.plan.tasks), options)} if "scale" in options else {}
    infos = _infos(prepared, _merged(prepared, parts))
    write_index(prepared, out, infos)
    needed = sum(info.nbytes for name, info in infos.items() if name not in prepared.base.output)
    _finish(prepared, out, fingerprint, needed, scale, known)


def assemble_checkpoints(
    prepared: OpenedRecipe, parts: Parts, out: Path, fingerprint: str, known: Mapping[str, FileEntry]
) -> None:
    """Write what a checkpoint of each task has besides its weights; and what all would weigh in the method's own form."""
    headers = _headers(prepared, parts)
    for task in prepared.recipe.tasks:
        folder = out / task.name
        write_config(prepared, folder)
        write_index(prepared, folder, _restored_infos(prepared, headers, task.name))
        copy_processor(prepared, folder)
        copy_head(prepared, task, folder)
    counted = [part for tensor, part in headers.items() if tensor.name not in prepared.base.output]
    compressed = sum(info.nbytes for part in counted for name, info in part.items() if name != "norm")
    base = sum(prepared.base.info(name).nbytes for name in prepared.base.slots if name not in prepared.base.output)
    _finish(prepared, out, fingerprint, base + compressed, {}, known)


def _restored_infos(
    prepared: OpenedRecipe, parts: dict[TensorPlan, dict[str, TensorInfo]], task: str
) -> dict[str, TensorInfo]:
    """The tensors of one task's model."""
    own = {t.name: part[f"{task}.whole"] for t, part in parts.items() if f"{task}.whole" in part}
    base = prepared.base
    return {n: base.info(n) if n in base.slots else own[n] for n in sorted({*base.slots, *own})}


def _write_restored(
    prepared: OpenedRecipe,
    parts: dict[TensorPlan, dict[str, TensorInfo]],
    task: str,
    names: Iterable[str],
    path: Path,
) -> None:
    """Some tensors of one task's backbone, streamed from the compressed form of all."""
    tensors = {t.name: t for t, part in parts.items() if t.in_base or f"{task}.whole" in part}
    every = _restored_infos(prepared, parts, task)
    infos = {name: every[name] for name in names}

    def data(name: str) -> memoryview | TensorInfo:
        """Bytes of one tensor of the task's checkpoint."""
        if name not in tensors:
            return base_bytes(prepared, name)
        part = parts[tensors[name]]
        if f"{task}.whole" in part:
            return part[f"{task}.whole"]
        change = _restored(prepared, tensors[name], part, task)
        if change is None:
            return base_bytes(prepared, name)
        base = prepared.base.read(name)
        return tensor_bytes((base.float() + change).to(base.dtype))

    write_stream(path, infos, (data(name) for name in infos))


def _restored(prepared: OpenedRecipe, tensor: TensorPlan, part: dict[str, TensorInfo], task: str) -> Tensor | None:
    read = {n: read_tensor(i) for n, i in part.items() if n == "unified" or n.startswith(f"{task}.")}
    change = KEEPING_METHODS[prepared.plan.method].restored(read, task)
    if change is None or tensor.matrix is None:
        return change
    return from_matrix(change, prepared.base.slots[tensor.name])


def _finish(
    prepared: OpenedRecipe,
    out: Path,
    fingerprint: str,
    needed: int,
    more: dict[str, float],
    known: Mapping[str, FileEntry],
) -> None:
    """Recipe, card and manifest."""
    (out / STATIC_RECIPE).write_text(prepared.recipe.dump(), encoding="utf-8", newline="\n")
    (out / CARD).write_text(checkpoint_card(prepared), encoding="utf-8", newline="\n")
    base = prepared.base
    output = sum(base.info(name).nbytes for name in base.output if name in base.slots)
    about = {
        "base": {"class": prepared.plan.base_class, "bytes": prepared.plan.sizes.base - output},
        "tasks": [task.name for task in prepared.recipe.tasks],
        "needed_bytes": needed,
        **more,
    }
    write_manifest(out, {**common(prepared, fingerprint), **about}, known)
