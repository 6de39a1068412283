"""The experts' own answers: each is opened from where the bundle's recipe found it, dense, one after the other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from massmerge.bundle.layout import BASE, HEAD, LABELS, PROCESSOR, TASKS
from massmerge.bundle.reader import Bundle
from massmerge.errors import InputError, problems_error
from massmerge.evaluation.data import TaskData
from massmerge.evaluation.metrics import Given, given_of, written
from massmerge.io.checksums import file_sha256
from massmerge.io.durable import write_text
from massmerge.io.placement import CPU, Placement
from massmerge.merging.open_recipe import OpenedRecipe, open_recipe
from massmerge.model.base import load_base
from massmerge.model.core import Core
from massmerge.model.heads.classify import load_head
from massmerge.model.heads.language import dense_language_model
from massmerge.model.inputs import InputReader, Row, read_batches
from massmerge.model.prompts import Writing


@dataclass(frozen=True)
class Experts:
    """A bundle with the base and the experts that it was made from, opened but not read."""

    bundle: Bundle
    sources: OpenedRecipe


def open_experts(bundle: Bundle, folder: Path, device: str = "auto", dtype: str = "auto") -> Experts:
    """The base and the experts that a bundle was made from.

    Args:
        bundle: the bundle.
        folder: what relative paths of its recipe start from.
        device: where experts run, as in `load`.
        dtype: the type that they run in, as in `load`.

    Raises:
        InputError: one of them is missing, or is not an expert of the base.
    """
    try:
        prepared = open_recipe(bundle.recipe, folder, download=True)
        prepared.place = Placement.choose(device, dtype, prepared.base.dtype)
        if prepared.plan.errors:
            raise problems_error(prepared.plan.errors)
    except InputError as error:
        raise InputError(
            f"{error}\nMeasuring the experts needs their files. Relative paths of the recipe start at "
            f"{folder.resolve()}; use --folder to change that. Or give each task a `reference` in the suite."
        ) from None
    return Experts(bundle, prepared)


def expert_answers(
    opened: Experts,
    data: TaskData,
    *,
    batch_size: int = 32,
    keep: Path | None = None,
    generate: dict[str, Any] | None = None,
    progress: Callable[[Iterable[int], str, int], Iterable[int]] = lambda items, what, total: items,
) -> list[Given]:
    """What a task's own expert answers to each of its rows.

    Args:
        opened: the experts, and the bundle that gives base, head and processor.
        data: the task's rows.
        batch_size: rows that run at once.
        generate: options with which it writes its answers; none for an expert with a head.
        keep: folder in which answers are kept; those of the same expert and the same rows are not computed again.
        progress: wraps the rows.
    """
    key = _key(opened, data, generate)
    path = None if keep is None else keep / f"{data.task}-{key[:16]}.json"
    if path is not None and (kept := _read(path, key)) is not None:
        return kept
    # Text is padded to the longest of its batch, so inputs of like size go together.
    places = progress(sorted(range(len(data)), key=data.inputs.size), f"expert {data.task}", len(data))
    measure = _measure if generate is None else partial(_measure_texts, generate)
    answers = measure(opened, data, batch_size, places)
    if path is not None:
        _write(path, key, opened, data, answers)
    return answers


def _key(opened: Experts, data: TaskData, generate: dict[str, Any] | None) -> str:
    """Checksum of everything that an expert's answers depend on: its files, base, head, processor, and the rows."""
    files = {path.name: file_sha256(path) for path in opened.sources.experts[data.task].source.files()}
    parts = (f"{BASE}/", f"{PROCESSOR}/", f"{TASKS}/{data.task}/{HEAD}/", f"{TASKS}/{data.task}/{LABELS}")
    manifest = opened.bundle.manifest
    inside = {name: e["sha256"] for name, e in manifest["files"].items() if name.startswith(parts)}
    place = opened.sources.place
    about = [files, inside, manifest["base"], data.sha256(), *([] if generate is None else [generate])]
    about += [] if place == Placement() else [str(place)]  # others round differently
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _write(path: Path, key: str, opened: Experts, data: TaskData, answers: list[Given]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    expert = opened.sources.experts[data.task].source.text
    about = {"key": key, "task": data.task, "expert": expert, "data": data.where}
    write_text(path, json.dumps({**about, "answers": answers}, ensure_ascii=False))


def _read(path: Path, key: str) -> list[Given] | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return [Given(*answer) for answer in kept["answers"]] if kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or cut off: it is made again


@torch.inference_mode()
def _measure(opened: Experts, data: TaskData, batch_size: int, places: Iterable[int]) -> list[Given]:
    bundle = opened.bundle
    model = dense_expert(opened, data.task)
    head = load_head(bundle.head_folder(data.task), model)
    labels = next(task.labels for task in bundle.tasks if task.name == data.task)
    assert head is not None and labels is not None
    reader = InputReader(bundle.processor_folder, model.config, image=model.main_input_name == "pixel_values")
    core = Core(model, [data.task], {data.task: labels}, {data.task: head}, reader, [])
    answers = [Given()] * len(data)
    for chosen, rows in _readable(core.reader.row, data, batch_size, places):
        batch = core.batch(rows)
        found = core.answers(model(**core.call(batch)), batch, [data.task] * len(rows), top=1)
        for place, prediction in zip(chosen, found, strict=True):
            answers[place] = given_of(prediction)
    return answers


def _measure_texts(
    options: dict[str, Any], opened: Experts, data: TaskData, batch_size: int, places: Iterable[int]
) -> list[Given]:
    """The same for an expert that writes: transformers' own `generate` on its dense weights."""
    bundle = opened.bundle
    base, where = dense_expert(opened, data.task), opened.sources.place
    model, defaults = dense_language_model(bundle.path, base, data.task)
    reader = InputReader(bundle.processor_folder, base.config, image=False)
    writing = Writing(reader, base.config, defaults, options)
    answers = [Given()] * len(data)
    for chosen, rows in _readable(writing.read, data, batch_size, places):
        written_on = writing.texts(rows, lambda batch: writing.generate(model, where.batch(batch)))
        for place, found in zip(chosen, written_on, strict=True):
            answers[place] = written(data.task, found.text)
    return answers


def dense_expert(opened: Experts, task: str) -> PreTrainedModel:
    """The base with every tensor of an expert in its place."""
    expert, slots = opened.sources.experts[task], opened.sources.base.skeleton.slots
    place = opened.sources.place
    model = load_base(opened.bundle, expert.names(), replace(place, device=CPU), check=False)
    held = model.state_dict()
    if strange := sorted(expert.names() - held.keys()):
        raise InputError(f"task {task}: the base has no place for {', '.join(strange)}.")
    model.load_state_dict({n: expert.read(n).value(held[n], slots[n]) for n in expert.names()}, strict=False)
    return model.to(place.device)


def _readable(
    read: Callable[[Any], Row], data: TaskData, size: int, places: Iterable[int]
) -> Iterator[tuple[list[int], list[Row]]]:
    """Rows that can be read, so many at a time; the stream tells of the others."""
    asked: list[int] = []

    def items() -> Iterator[Any]:
        """The inputs, their places noted as they are asked for."""
        for place in places:
            asked.append(place)
            yield data.inputs[place]

    for rows in read_batches(items(), size, read, "row"):
        pairs = [(place, row) for place, row in zip(asked, rows, strict=True) if not isinstance(row, InputError)]
        asked.clear()
        if pairs:
            yield [place for place, _ in pairs], [row for _, row in pairs]
