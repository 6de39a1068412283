"""One report of all studies: what was compared, on what, and who won."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from massmerge.evaluation.report import Heading, Items, Numbers, Part, Table, Text, write_report
from massmerge.io.durable import write_text
from massmerge.research.studies.result import Result, about_lines, study_parts, verdict_words
from massmerge.research.studies.study import Verdict

_BEGIN = (
    "One backbone was fine-tuned once for each task. MASS stores these experts as one bundle; an input comes without a task "
    "name, finds its task by itself and is answered. Each study below compares one part of that with its alternatives, on "
    "the same rows of labelled data."
)


def write_overview(results: Sequence[Result], left_out: Mapping[str, str], folder: Path) -> None:
    """Write `report.md` and `report.html` with everything in them, and `result.json` with all figures."""
    data = {"studies": [result.to_dict() for result in results], "left_out": dict(left_out)}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=2, ensure_ascii=False)
    write_text(folder / "result.json", text + "\n")
    write_report(folder, f"Studies of MASS on {results[0].about['suite']}", overview_parts(results, left_out))


def overview_parts(results: Sequence[Result], left_out: Mapping[str, str]) -> list[Part]:
    """The report of all studies: who won, what it was measured on, then each study by itself."""
    verdicts = {result.study.name: result.finding.verdict for result in results}
    parts = verdict_parts(verdicts, results[0].about["data"])
    for result in results:
        parts += [Heading(f"{result.study.name}: {result.study.title}"), *study_parts(result)]
    if left_out:
        parts += [Heading("Studies that were left out"), Items([f"{name}: {why}" for name, why in left_out.items()])]
    return [*parts, Heading("How it was measured"), Items(about_lines(results))]


def verdict_parts(verdicts: Mapping[str, Verdict], data: Mapping[str, Mapping[str, int]]) -> list[Part]:
    """The best method of each study, and how many rows of each task there were (`rows` of `total`)."""
    rows = sum(one["rows"] for one in data.values())
    wins = sum(verdict.won for verdict in verdicts.values())
    ties = sum(verdict.tied for verdict in verdicts.values())
    numbers = [
        (f"{wins} of {len(verdicts)}", "studies are won by MASS as it is shipped"),
        (f"{ties}", "more are lost by less than other rows would move the figures"),
        (f"{rows:,}", f"rows of {len(data)} tasks were answered"),
    ]
    headers = ["study", "measure", "best", "figure", "MASS", "its figure", "won"]
    winners = [_winner(name, verdict) for name, verdict in verdicts.items()]
    parts: list[Part] = [Text(_BEGIN), Numbers(numbers), Heading("Who won"), Table(headers, winners)]
    lost = [f"{name}: {verdict_words(verdict)}" for name, verdict in verdicts.items() if not verdict.won]
    if lost:
        parts += [Heading("Where MASS does not win"), Items(lost)]
    measured = [[task, f"{one['rows']:,}", f"{one['total']:,}"] for task, one in data.items()]
    return [*parts, Heading("What was measured"), Table(["task", "rows", "of"], measured)]


def _winner(name: str, verdict: Verdict) -> list[str]:
    won = "yes" if verdict.won else "tie" if verdict.tied else "no"
    return [
        name,
        verdict.measure,
        verdict.mass if verdict.won else verdict.best,
        f"{100 * max(verdict.best_value, verdict.mass_value):.1f} %",
        verdict.mass,
        f"{100 * verdict.mass_value:.1f} %",
        won,
    ]
