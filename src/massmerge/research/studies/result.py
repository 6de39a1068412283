"""A study that has been run, and how it is written: figures, words, tables and plots."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import massmerge
from massmerge.evaluation.report import Heading, Items, Part, Text, write_report
from massmerge.io.durable import write_text
from massmerge.research.studies.study import Finding, Study, Verdict

_LIBRARIES = ("torch", "transformers", "numpy", "optuna")


@dataclass(frozen=True)
class Result:
    """A study that has been run."""

    study: Study
    finding: Finding
    about: dict[str, Any]
    """Command, date, machine, versions, settings, suite, bundle."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As plain data; `rows` and `verdict` repeat, dates and times do not."""
        found = self.finding
        return {
            "study": self.study.name, "title": self.study.title, "question": self.study.question, **self.about,
            "rows": list(found.rows), "verdict": asdict(found.verdict), "sentences": list(found.sentences),
            "notes": list(found.notes), "times": {"all": round(self.seconds, 1), "cells": list(found.times)},
        }  # fmt: skip


def machine() -> str:
    """What figures of time were measured on."""
    import torch

    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {accelerator}"


def versions() -> dict[str, str]:
    """Of Python, of this package and of the libraries that figures depend on."""
    found = {"python": platform.python_version(), "massmerge": massmerge.__version__}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


# What is written


def write_result(result: Result, folder: Path) -> None:
    """Write `result.json`, `report.md`, `report.html` and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result.to_dict(), indent=2, ensure_ascii=False)
    write_text(folder / "result.json", text + "\n")
    title = f"{result.study.title}: {result.about['suite']}"
    write_report(folder, title, [*study_parts(result), *_end(result)])


def study_parts(result: Result) -> list[Part]:
    """Question, what was found, tables and plots of one study."""
    found = result.finding
    parts: list[Part] = [
        Text(result.study.question),
        Items([verdict_words(found.verdict), *found.sentences]),
        *found.parts,
    ]
    if found.notes:
        parts.append(Items(found.notes))
    return parts


def verdict_words(verdict: Verdict) -> str:
    """The best method in a sentence; if it is not MASS, by how much and why."""
    figures = f"{100 * verdict.mass_value:.1f} %"
    if verdict.won:
        level = verdict.best_value == verdict.mass_value and verdict.best != verdict.mass
        return (
            f"MASS ({verdict.mass}) is level with {verdict.best}, and nothing is better: {verdict.measure} {figures}."
            if level
            else f"MASS ({verdict.mass}) is the best: {verdict.measure} {figures}."
        )
    gap = 100 * (verdict.best_value - verdict.mass_value)
    words = (
        f"{verdict.best} is the best: {verdict.measure} {100 * verdict.best_value:.1f} %, MASS ({verdict.mass}) {figures}, "
        f"{gap:.1f} points less"
    )
    if verdict.tied:
        words += (
            f", which is within the margin of {100 * verdict.margin:.1f} points that drawing other rows would move it"
        )
    return f"{words}. {verdict.why}".strip()


def _end(result: Result) -> list[Part]:
    return [Heading("How it was measured"), Items(about_lines([result]))]


def about_lines(results: Sequence[Result]) -> list[str]:
    """Command, date, machine, versions, data and time, a line each."""
    about = results[0].about
    settings = about["settings"]
    rows = sum(one["rows"] for one in about["data"].values())
    limit = f", at most {settings['limit']} of each task" if settings["limit"] else ""
    times = ", ".join(f"{one.study.name} {duration(one.seconds)}" for one in results)
    return [
        *([f"command: `{about['command']}`"] if about["command"] else []),
        f"date: {about['created']}",
        f"machine: {about['machine']}",
        f"versions: {', '.join(f'{name} {number}' for name, number in about['versions'].items())}",
        f"data: suite {about['suite']}, split {settings['split']}, {rows:,} rows of {len(about['data'])} tasks{limit}, "
        f"seed {settings['seed']}",
        f"bundle: {about['bundle']}",
        f"time of this run, finished cells of earlier ones not counted: {times}",
    ]


def duration(seconds: float) -> str:
    """A time as people say it."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{round(seconds / 60)} min"
