"""One page about a suite: its tasks, what the experts learned, and what each bundle reaches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXPERTS = {"experts": "Full fine-tunes", "experts_lora": "LoRA adapters, rank 8"}


def write_summary(folder: Path, name: str) -> Path:
    """Write `report/README.md` from what lies in the suite's folder; returns its path."""
    lines = [f"# The {name} suite", "", *_sources(folder), *_data(folder)]
    for experts, title in EXPERTS.items():
        lines += _experts(folder / experts, title)
    for result in sorted((folder / "report").glob("*/result.json")):
        lines += _bundle(result)
    path = folder / "report" / "README.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def _sources(folder: Path) -> Iterator[str]:
    source = _read(folder / "base" / "source.json")
    if source:
        yield f"Base: {' '.join(str(source[key]) for key in ('registry', 'name', 'version') if key in source)}."
        yield ""


def _data(folder: Path) -> list[str]:
    found = {path.parent.name: _read(path) for path in sorted((folder / "data").glob("*/data.json"))}
    rows = [
        [
            task, len(data["classes"]), *(data["rows"][split] for split in ("train", "validation", "test")),
            data["repeats_dropped"], data["near_duplicates"], data["licence"],
        ]
        for task, data in found.items()
    ]  # fmt: skip
    heads = ["task", "classes", "train", "validation", "test", "repeats dropped", "near-duplicates", "licence"]
    return ["## Data", "", *_table(heads, rows)] if rows else []


def _experts(folder: Path, title: str) -> list[str]:
    found = {path.parent.name: _read(path) for path in sorted(folder.glob("*/metrics.json"))}
    rows = []
    for task, metrics in found.items():
        frozen, tuned = metrics["frozen"], metrics["finetuned"]
        shares = [_share(part[split]) for split in ("validation", "test") for part in (frozen, tuned)]
        rows.append([task, *shares, metrics["protocol"]["samples"], f"{metrics['seconds']:.0f}"])
    heads = ["task", "frozen, validation", "expert, validation", "frozen, test", "expert, test", "samples", "seconds"]
    return [f"## {title}", "", *_table(heads, rows)] if rows else []


def _bundle(path: Path) -> list[str]:
    result = _read(path)
    rows = [
        [
            task["task"], task["rows"], _share(task["strict"]["value"]), _share(task["shared"]["value"]),
            _share(task["routing"]["value"]), _share(task["reference"]),
            _share(task["normalised"]["value"] if task["normalised"] else None),
        ]
        for task in result["tasks"]
    ]  # fmt: skip
    means = result["means"]
    rows.append(["mean", "", *(_share(means.get(key, {}).get("value")) for key in _MEANS)])
    heads = ["task", "rows", "accuracy", "shared labels", "routing", "expert", "normalised"]
    ratio = f", {result['sizes']['ratio']:.2f} times the base" if result.get("sizes") else ""
    return [f"## Bundle {path.parent.name} ({result['created'][:10]}{ratio})", "", *_table(heads, rows)]


_MEANS = ("strict", "shared", "routing", "reference", "normalised")


def _table(heads: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [*("| " + " | ".join(map(str, line)) + " |" for line in lines), ""]


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
