"""One page about a suite: its tasks, what the experts learned, and what each bundle reaches."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.suites.finetune import chance_of

BASES = {
    "vision": "DINOv2 ViT-S/14 at 98 pixels",
    "text": "all-MiniLM-L6-v2, mean pooling",
    "mpnet": "all-mpnet-base-v2, mean pooling, texts of at most 64 tokens, experts fine-tuned with products in bfloat16",
    "llm": "SmolLM2-135M-Instruct",
}
EXPERTS = {
    "experts": "Full fine-tunes",
    "experts_lora": "LoRA adapters, rank 8, each from a random start of its own",
    "experts_lora_same_start": "LoRA adapters, rank 8, all from one random start",
}


SEEDS = ("seed1", "seed2")
"""Sets of the tasks of `core`, whose experts saw their rows in other orders."""
PICTURES = {"radar": "Accuracy of each task", "confusion": "Where inputs were sent"}


def write_summary(folder: Path, name: str, target: Path | None = None) -> Path:
    """Write the page of a suite from what lies in its folder; returns its path.

    Args:
        folder: the suite's folder.
        name: the suite.
        target: a folder to publish in, as `NAME.md` with its pictures; `report/README.md` of the suite if not given.
    """
    path = target / f"{name}.md" if target else folder / "report" / "README.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"# The {name} suite", "", *_origin(name), *_sources(folder)]
    results = {path.parent.name: path for path in sorted((folder / "report").glob("*/result.json"))}
    for name_of_set, result in results.items():
        if name_of_set in SEEDS:
            continue
        lines += _bundle(result)
        lines += _compared(folder / "compare" / result.parent.name)
        lines += _rungs(folder / "compare" / f"{result.parent.name}-rungs.json", rung_rows(name))
        lines += _pictures(result.parent, path, name)
    lines += _seeds([results[one] for one in ("core", *SEEDS) if one in results])
    for experts, title in EXPERTS.items():
        lines += _experts(folder / experts, title)
    lines += _data(folder)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def _origin(name: str) -> list[str]:
    """How the page came about."""
    command = f"python -m benchmarks.suites {name}"
    machine = (
        f"{os.cpu_count()} cores, {platform.machine()}, no GPU, torch {torch.__version__.partition('+')[0]}, float32"
    )
    words = "Defaults only; accuracies in per cent. The bundles' dates stand beside them."
    return ["```bash norun", command, "```", "", f"Machine: {machine}. {_commit()}{words}", ""]


def _commit() -> str:
    """The state of the sources, if they are a checkout."""
    try:
        asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        found = subprocess.run(asked, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"Page written at commit {found.stdout.strip()}. "


def _pictures(report: Path, page: Path, name: str) -> Iterator[str]:
    """The plots of a report, copied beside a page that lies elsewhere."""
    for picture, caption in PICTURES.items():
        source = report / f"{picture}.png"
        if not source.is_file():
            continue
        link = f"{report.name}/{picture}.png"
        if page.parent != report.parent:
            link = f"{name}-{report.name}-{picture}.png"
            shutil.copyfile(source, page.parent / link)
        yield from (f"![{caption}, {report.name}]({link})", "")


def _sources(folder: Path) -> Iterator[str]:
    source = _read(folder / "base" / "source.json")
    if source:
        where = " ".join(str(source[key]) for key in ("source", "registry", "name", "version") if key in source)
        yield f"Base: {BASES.get(folder.name, folder.name)} (from {where})."
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
        kept = _share(frozen["test"] / tuned["test"]) if tuned["test"] else ""
        seconds = f"{metrics['processor_seconds']:.0f}"
        rows.append([task, *shares, kept, *_changed(metrics["paired"]), metrics["protocol"]["samples"], seconds])
    heads = [
        "task", "frozen, validation", "expert, validation", "frozen, test", "expert, test", "frozen, share of the expert",
        "rows gained, lost", "by chance", "samples", "processor seconds",
    ]  # fmt: skip
    return [f"## {title}", "", _HEADS, "", *_table(heads, rows)] if rows else []


def _changed(paired: dict[str, dict[str, int]]) -> tuple[str, str]:
    """Rows of validation and test that an expert has gained and lost against its frozen head, and the odds of that."""
    gained, lost = (sum(part[key] for part in paired.values()) for key in ("gained", "lost"))
    chance = chance_of(gained, lost)
    return f"{gained}, {lost}", f"{chance:.3f}" if chance >= 0.001 else "< 0.001"


_HEADS = (
    "*Frozen* is the expert's own head on the base: means of four examples per class, fixed before the fine-tuning. *Rows "
    "gained, lost*: of validation and test, those that the expert gets right and its frozen head does not, and the other "
    "way round; *by chance* is the odds of so many gains if the expert were no better (McNemar's exact test, one-sided)."
)


def _compared(folder: Path) -> list[str]:
    """The lines that a sceptic asks for, out of the table of all methods."""
    found = _read(folder / "methods" / "result.json")
    if not found:
        return []
    by_name = {row["method"]: row for row in found["rows"]}
    statics = [row for row in found["rows"] if row["kind"] == "static merge"]
    best = max(statics, key=lambda row: row["task_given"]["mean"])["method"]
    peers = [row["method"] for row in found["rows"] if row["kind"] == "routed peer"]
    names = ["base", "base, routed", best, f"{best}, routed", *peers, "mass", "mass, task given", "experts"]
    rows = [
        [_NAMES.get(name, name), *(_figure(row[key]) for key in _COLUMNS), f"{row['of_the_base']:.2f}"]
        for name in names
        for row in [by_name.get(name)]
        if row
    ]
    heads = ["method", "task unknown", "logits standardised per head", "task given", "size, times the base"]
    count = sum(data["rows"] for data in found["data"].values())
    words = (
        f"Every method on the same {count} test rows; normalised accuracy. `{best}` is the best of {len(statics)} static "
        "merges with the task given."
    )
    return [words, "", *_table(heads, rows)]


_COLUMNS = ("task_unknown", "task_unknown_standardised", "task_given")
_NAMES = {
    "base": "frozen base, the same heads", "base, routed": "frozen base, the same heads, our router (one pass)",
    "mass": "**MASS**", "mass, task given": "**MASS**, task given", "smile_1": "SMILE-1", "smile_2": "SMILE-2",
    "twin": "Twin-Merging", "wemoe": "WeMoE", "arrow": "Arrow",
}  # fmt: skip


def _figure(found: dict[str, Any] | None) -> str:
    return _share(found["normalised"]) if found else ""


def rung_rows(suite: str) -> int:
    """How many rows per task answer what a calibration is worth."""
    return 100 if suite == "mpnet" else 200


def _rungs(path: Path, rows_per_task: int) -> list[str]:
    """What routing reaches with inputs of the tasks, and in the paper's setting."""
    if not path.is_file():
        return []
    rows = [
        [_rung_name(rung), f"{rung['times_the_base']:.2f}", *(_share(rung[key]) for key in _RUNG_COLUMNS)]
        for rung in _read(path)
    ]
    words = (
        "With unlabelled inputs of each task (`mass calibrate`), and in the paper's setting; up to "
        f"{rows_per_task} rows per task:"
    )
    return [words, "", *_table(["router", "size, times the base", "routing", "accuracy", "normalised"], rows)]


_RUNG_COLUMNS = ("routing", "strict", "normalised")


def _rung_name(rung: dict[str, Any]) -> str:
    if rung["kind"] == "paper":
        return "no inputs, the paper's setting"
    return f"{rung['count']} inputs per task ({rung['kind']})" if rung["count"] else "no inputs"


def _bundle(path: Path) -> list[str]:
    result = _read(path)
    rows = [
        [
            task["task"], task["rows"], _share(task["strict"]["value"]), _share(task["shared"]["value"]),
            _share(task["routing"]["value"]), _share(task["reference"]), _share(_value(task["normalised"])),
            _share(_value(task["normalised_known"])),
        ]
        for task in result["tasks"]
    ]  # fmt: skip
    means = result["means"]
    rows.append(["mean", "", *(_share(means.get(key, {}).get("value")) for key in _MEANS)])
    heads = ["task", "rows", "accuracy", "shared labels", "routing", "expert", "normalised", "normalised, task given"]
    ratio = f", {result['sizes']['ratio']:.2f} times the base" if result.get("sizes") else ""
    return [f"## Bundle {path.parent.name} ({result['created'][:10]}{ratio})", "", *_table(heads, rows)]


def _seeds(results: list[Path]) -> list[str]:
    """The same bundle of experts that were fine-tuned again, if there are some."""
    if len(results) < 2:
        return []
    means = [_read(path)["means"] for path in results]
    columns = [[means_of_one[key]["value"] for means_of_one in means] for key in _SEED_MEANS]
    rows = [[path.parent.name, *map(_share, line)] for path, *line in zip(results, *columns, strict=True)]
    rows.append(["mean ± standard deviation", *(f"{_share(mean(one))} ± {_share(stdev(one))}" for one in columns)])
    words = "The experts of `core` fine-tuned again, each time with its rows in another order; all test rows."
    heads = ["experts", "routing", "accuracy", "expert", "normalised", "normalised, task given"]
    return ["## Other seeds", "", words, "", *_table(heads, rows)]


_SEED_MEANS = ("routing", "strict", "reference", "normalised", "normalised_known")
_MEANS = ("strict", "shared", "routing", "reference", "normalised", "normalised_known")


def _value(figure: dict[str, Any] | None) -> float | None:
    return figure["value"] if figure else None


def _table(heads: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [*("| " + " | ".join(map(str, line)) + " |" for line in lines), ""]


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _read(path: Path) -> Any:
    """What a JSON file holds; an empty object if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
