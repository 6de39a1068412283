"""Puts the parts of a finished merge together: the files of the bundle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

import massmerge
from massmerge.bundle.base import base_sha256
from massmerge.bundle.encoding import PARTS, stored_type
from massmerge.bundle.layout import (
    BASE,
    CARD,
    ENCODED_FORMAT,
    FACTORS,
    FIXED,
    PROCESSOR,
    RECIPE,
    ROUTER,
    STATISTICS,
    further_home,
    task_folder,
)
from massmerge.bundle.manifest import FileEntry, write_manifest
from massmerge.bundle.parts import Parts, tensor_key
from massmerge.checkpoints import Source
from massmerge.checkpoints.expert_tensors import finite
from massmerge.errors import InputError
from massmerge.io.addresses import is_address
from massmerge.io.shards import INDEX, WEIGHTS, cut, index_text
from massmerge.io.tensor_file import TensorInfo, read_tensor, tensor_bytes, write_stream, write_tensors
from massmerge.io.untrusted import GENERATION_CONFIG
from massmerge.merging.card import bundle_card, terms_of_all
from massmerge.merging.heads import write_head
from massmerge.merging.heads.sources import write_json
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.merging.plan import TensorPlan
from massmerge.merging.units import LargeFile
from massmerge.recipe import Recipe, TaskRecipe


def bundle_files(prepared: OpenedRecipe) -> list[LargeFile]:
    """The large files of a bundle: the base's weights, and each task's factors."""
    copied = weight_files(prepared, Path(BASE), base_infos(prepared)) if prepared.copies_base else []
    tasks = [
        LargeFile(task_folder(Path(), task.name) / FACTORS, position, task.factor_bytes + task.whole_bytes)
        for position, task in enumerate(prepared.plan.tasks)
    ]
    return [*copied, *tasks]


def weight_files(
    prepared: OpenedRecipe, folder: Path, infos: Mapping[str, TensorInfo], task: int | None = None
) -> list[LargeFile]:
    """The files of the weights in a folder of the result, as many as their size asks for."""
    return [
        LargeFile(folder / file, task, sum(infos[name].nbytes for name in names), names)
        for file, names in cut(infos, prepared.recipe.merge.shard_bytes).items()
    ]


def write_index(prepared: OpenedRecipe, folder: Path, infos: Mapping[str, TensorInfo]) -> None:
    """Write the index of the weights in a folder, if they have several files."""
    files = cut(infos, prepared.recipe.merge.shard_bytes)
    if len(files) > 1:
        (folder / f"{WEIGHTS}{INDEX}").write_text(index_text(files, infos), encoding="utf-8", newline="\n")


def base_infos(prepared: OpenedRecipe) -> dict[str, TensorInfo]:
    """The base's tensors in the order in which they are written."""
    return {name: prepared.base.info(name) for name in sorted(prepared.base.slots)}


def write_bundle_file(prepared: OpenedRecipe, parts: Parts, file: LargeFile, path: Path) -> None:
    """Write a task's factors, or with no task some of the base's weights."""
    if file.task is None:
        _write_base(prepared, file.tensors, path)
    else:
        _write_task(prepared, parts, file.task, path)


def assemble_bundle(
    prepared: OpenedRecipe, parts: Parts, out: Path, fingerprint: str, known: Mapping[str, FileEntry]
) -> None:
    """Write what a bundle has besides its large files.

    Args:
        prepared: what is merged.
        parts: the finished tensors.
        out: the folder, with the large files in it.
        fingerprint: of the merge.
        known: the manifest's entries of the large files.
    """
    recipe, plan = prepared.recipe, prepared.plan
    (out / BASE).mkdir(exist_ok=True)
    write_config(prepared, out / BASE)
    if prepared.copies_base:
        write_index(prepared, out / BASE, base_infos(prepared))
    if prepared.base_head is not None:
        write_head(out / BASE, prepared.base_head)
    copy_processor(prepared, out / PROCESSOR)
    for task in recipe.tasks:
        copy_head(prepared, task, task_folder(out, task.name))
    _write_statistics(prepared, parts, out / STATISTICS)
    if prepared.bundled is not None and (moments := prepared.bundled.moments()):
        write_tensors(out / ROUTER, moments)
    if recipe.router.first_pass == "fixed":
        _write_fixed(prepared, parts, out / FIXED)
    (out / RECIPE).write_text(recipe.dump(), encoding="utf-8", newline="\n")
    ranks = _ranks(prepared, parts)
    (out / CARD).write_text(bundle_card(prepared, ranks), encoding="utf-8", newline="\n")
    base_terms, terms = terms_of_all(prepared)
    tasks = [
        {"name": t.name, "source": t.source, "revision": t.revision, "form": t.form, "head": t.head}
        | terms[t.name].to_dict()
        for t in plan.tasks
    ]
    base = {"class": plan.base_class, "source": plan.base, "revision": plan.base_revision, "bytes": plan.sizes.base}
    base |= {"dtype": str(prepared.base.dtype).removeprefix("torch.")} | base_terms.to_dict()
    if not prepared.copies_base:
        base |= {"location": _location(prepared.base.source), "sha256": base_sha256(prepared.base)}
    said = {**common(prepared, fingerprint), "base": base, "tasks": tasks, "ranks": ranks}
    encoded = any(_encoded(recipe, tensor) for tensor in plan.tensors)
    write_manifest(out, said | ({"format_version": ENCODED_FORMAT} if encoded else {}), known)


def _encoded(recipe: Recipe, tensor: TensorPlan) -> bool:
    """Whether a matrix's factors are of another type than the base."""
    dtype = getattr(torch, tensor.dtype)
    return tensor.matrix is not None and stored_type(recipe.merge.factors, dtype, tensor.matrix) != dtype


def copy_head(prepared: OpenedRecipe, task: TaskRecipe, folder: Path) -> None:
    """A task's head and its labels, into its folder; and its further heads."""
    try:
        write_head(folder, prepared.heads[task.name])
        for name, head in prepared.further.get(task.name, {}).items():
            home = further_home(folder, name)
            home.mkdir(parents=True)
            write_head(home, head)
    except InputError as error:
        raise InputError(f"task {task.name} ({task.expert}): {error}") from None


def _location(source: Source) -> str:
    """Where a base that is not copied will be found again: its path or address, or the hub's repository at its commit."""
    if is_address(source.text):
        return source.text
    return f"{source.text.partition('@')[0]}@{source.revision}" if source.revision else str(source.path)


def common(prepared: OpenedRecipe, fingerprint: str) -> dict[str, object]:
    """What the manifest of every merge says."""
    return {
        "tool": f"massmerge {massmerge.__version__}",
        "method": prepared.recipe.merge.method,
        "fingerprint": fingerprint,
    }


def write_config(prepared: OpenedRecipe, folder: Path) -> None:
    """The configuration of the backbone."""
    skeleton = prepared.base.skeleton
    config = json.loads(skeleton.config.to_json_string(use_diff=False)) | {"architectures": [skeleton.class_name]}
    config.pop("_name_or_path", None)
    write_json(folder / "config.json", config)
    generation = prepared.base.source.file(GENERATION_CONFIG)
    if generation is not None:
        shutil.copyfile(generation, folder / GENERATION_CONFIG)


def _write_base(prepared: OpenedRecipe, names: Iterable[str], path: Path) -> None:
    """The base under module names, which `from_pretrained` reads as well as the names of older versions."""
    infos = {name: prepared.base.info(name) for name in names}
    write_stream(path, infos, (base_bytes(prepared, name) for name in infos))


def base_bytes(prepared: OpenedRecipe, name: str) -> memoryview:
    """The data of one of the base's tensors."""
    return tensor_bytes(finite(prepared.base.read(name), f"base ({prepared.recipe.base})", name))


def copy_processor(prepared: OpenedRecipe, folder: Path) -> None:
    """The files of the tokenizer or image processor."""
    if prepared.processor:
        folder.mkdir(exist_ok=True)
    for name, path in sorted(prepared.processor.items()):
        shutil.copyfile(path, folder / name)


def _write_task(prepared: OpenedRecipe, parts: Parts, position: int, path: Path) -> None:
    """One task's factors and whole tensors, streamed from the parts."""
    infos: dict[str, TensorInfo] = {}
    for index, tensor in enumerate(prepared.plan.tensors):
        header = parts.header(tensor_key(index))
        for part in PARTS:
            if f"{position}.{part}" in header:
                infos[f"{tensor.name}.{part}"] = header[f"{position}.{part}"]
        if f"{position}.whole" in header:
            infos[tensor.name] = header[f"{position}.whole"]
    write_stream(path, infos, infos.values())


def _matrix_headers(prepared: OpenedRecipe, parts: Parts) -> Iterator[tuple[str, dict[str, TensorInfo]]]:
    for index, tensor in enumerate(prepared.plan.tensors):
        if tensor.matrix is not None:
            yield tensor.name, parts.header(tensor_key(index))


def _ranks(prepared: OpenedRecipe, parts: Parts) -> dict[str, list[int]]:
    count = len(prepared.recipe.tasks)
    return {
        name: [header[f"{i}.s"].shape[0] if f"{i}.s" in header else 0 for i in range(count)]
        for name, header in _matrix_headers(prepared, parts)
    }


def _write_statistics(prepared: OpenedRecipe, parts: Parts, path: Path) -> None:
    """A row for each matrix, in the order of the manifest's `ranks`."""
    rows = [header for _, header in _matrix_headers(prepared, parts)]
    names = ("norm", "energy", "cosine", "accepted")
    count = len(prepared.recipe.tasks)
    stacked = {n: [read_tensor(header[n]) for header in rows] for n in names}
    write_tensors(path, {n: torch.stack(v) if v else torch.zeros(0, count) for n, v in stacked.items()})


def _write_fixed(prepared: OpenedRecipe, parts: Parts, path: Path) -> None:
    """The core matrices: with the tasks' factors they are the fixed model."""
    infos = {name: header["core"] for name, header in _matrix_headers(prepared, parts) if "core" in header}
    write_stream(path, infos, infos.values())
