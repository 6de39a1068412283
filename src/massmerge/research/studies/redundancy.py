"""`redundancy`: what the filter leaves out of the fixed model, and what that does to routing."""

from __future__ import annotations

import re
from typing import Any, Literal

from massmerge.bundle.reader import Bundle
from massmerge.evaluation.report import Picture, Table
from massmerge.evaluation.summary import percent
from massmerge.recipe import Redundancy
from massmerge.research.studies import plots
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.figures import Measured, measure_routing
from massmerge.research.studies.fixed import Accepted, accepted_tasks, factors_of, matrices, pass_scores
from massmerge.research.studies.routers import paper_voter
from massmerge.research.studies.scores import best_tasks
from massmerge.research.studies.shipped import best_of, shipped_routings, shipped_voters
from massmerge.research.studies.study import PASSES, Finding, Study, Verdict

Metric = Literal["cosine", "angles"]
METRICS: tuple[Metric, ...] = ("cosine", "angles")
_GRID = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_QUICK = (0.05, 0.3, 0.9)
_KINDS = {"A": "attention, in", "O": "attention, out", "M": "MLP, in", "D": "MLP, out", "": "others"}


def run(context: StudyContext) -> Finding:
    """Make the fixed model of each filter, and route every sample through it."""
    rows = [_row(context, "base", None, None), _row(context, "none", None, accepted_tasks(context, "none"))]
    for metric in METRICS:
        for threshold in grid(context):
            kept = accepted_tasks(context, Redundancy(metric=metric, threshold=threshold))
            rows.append(_row(context, metric, threshold, kept))
    return Finding(rows, _verdict(context, rows), _sentences(context, rows), _parts(context, rows))


def grid(context: StudyContext) -> tuple[float, ...]:
    """The thresholds that are tried, the bundle's own among them."""
    _, own = own_filter(context)
    wanted = _QUICK if context.settings.quick else _GRID
    return tuple(sorted({*wanted, *([] if own is None else [own])}))


def own_filter(context: StudyContext) -> tuple[str, float | None]:
    """The filter of the row that is the bundle's first pass, with its threshold."""
    options = Bundle(context.bundle, check=False).recipe
    if options.router.first_pass != "fixed":
        return "base", None
    given = options.merge.redundancy
    return ("none", None) if isinstance(given, str) else (given.metric, given.threshold)


def _row(context: StudyContext, name: str, threshold: float | None, accepted: Accepted | None) -> dict[str, Any]:
    one = paper_voter(context)
    voters = list(dict.fromkeys([*shipped_voters(context), one]))
    scores = pass_scores(context, accepted, voters)
    row: dict[str, Any] = {"filter": name, "threshold": threshold}
    if accepted is not None:
        row |= _left_out(context, accepted)
    own = (name, threshold) == own_filter(context)
    chosen = best_of(context, shipped_routings(context)) if own else best_tasks(scores, context.model.stages.voters)
    row["vote"] = measure_routing(context, chosen).plain()
    row["one site"] = measure_routing(context, best_tasks(scores, [one])).plain()
    return row


def _left_out(context: StudyContext, accepted: Accepted) -> dict[str, Any]:
    """Shares of the deltas that a filter leaves out: of all, of each kind of matrix, of each task."""
    missing = {name: [t for t in factors_of(context, name) if t not in accepted[name]] for name in matrices(context)}
    there = {name: list(factors_of(context, name)) for name in missing}
    kinds = _kinds(context)

    def share(names: list[str]) -> float:
        """The share of deltas that are left out."""
        return sum(len(missing[n]) for n in names) / max(1, sum(len(there[n]) for n in names))

    by_task = {
        task: sum(t in missing[n] for n in missing) / max(1, sum(t in there[n] for n in there))
        for t, task in enumerate(context.tasks)
    }
    by_kind = {words: share(own) for words in _KINDS.values() if (own := [n for n in missing if kinds[n] == words])}
    return {"left_out": share(list(missing)), "left_out_kinds": by_kind, "left_out_tasks": by_task}


def _kinds(context: StudyContext) -> dict[str, str]:
    """For each matrix the kind of site that reads its input."""
    kinds = dict.fromkeys(matrices(context), _KINDS[""])
    for site in context.model.sites:
        if re.fullmatch(r"[AOMD]\d+", site.name):
            kinds |= {name: _KINDS[site.name[0]] for name in site.tensors if name in kinds}
    return kinds


def _name(row: dict[str, Any]) -> str:
    words = {"base": "the base, no fixed model", "none": "fixed model, nothing left out"}
    return words.get(row["filter"]) or f"fixed model, {row['filter']} ≤ {row['threshold']:g}"


def _verdict(context: StudyContext, rows: list[dict[str, Any]]) -> Verdict:
    own = next(row for row in rows if (row["filter"], row["threshold"]) == own_filter(context))
    best = max(rows, key=lambda row: row["vote"]["mean"])
    ours, theirs = Measured.of(own["vote"]), Measured.of(best["vote"])
    gains = {task: theirs.tasks[task] - ours.tasks[task] for task in ours.tasks}
    most = max(gains, key=lambda task: gains[task])
    cost = max(voter.site.depth for voter in context.model.stages.voters)
    why = "" if theirs.mean <= ours.mean else (
        f"The gap is largest on {most}: {percent(ours.tasks[most])} against {percent(theirs.tasks[most])}. A fixed model "
        f"must be stored or rebuilt, and changes when a task is added; the first pass costs {cost:.2f} of a forward "
        "either way."
    )  # fmt: skip
    return Verdict("routing accuracy of the vote, mean over the tasks", _name(best), theirs.mean, _name(own), ours.mean,
                   max(ours.margin, theirs.margin), why)  # fmt: skip


def _sentences(context: StudyContext, rows: list[dict[str, Any]]) -> list[str]:
    sentences = []
    for metric in METRICS:
        own = [row for row in rows if row["filter"] == metric]
        best = max(own, key=lambda row: row["vote"]["mean"])
        spread = sorted(row["vote"]["mean"] for row in own)
        moved = (
            f"move routing between {percent(spread[0])} and {percent(spread[-1])}; the best is {best['threshold']:g}"
        )
        moved = moved if spread[0] < spread[-1] else f"do not move routing, which is {percent(spread[0])}"
        sentences.append(
            f"By {metric}, thresholds from {own[0]['threshold']:g} to {own[-1]['threshold']:g} leave out "
            f"{percent(own[0]['left_out'])} to {percent(own[-1]['left_out'])} of the deltas and {moved}."
        )
    first = next(row for row in rows if row["filter"] == "cosine")
    worst = max(first["left_out_tasks"], key=lambda task: first["left_out_tasks"][task])
    sentences.append(
        f"At cosine ≤ {first['threshold']:g} the task that is left out most is {worst}: of "
        f"{percent(first['left_out_tasks'][worst])} of its matrices. The first task of the recipe is never left out."
    )
    return sentences


def _parts(context: StudyContext, rows: list[dict[str, Any]]) -> list[Table | Picture]:
    lines = []
    for row in rows:
        left = percent(row["left_out"]) if "left_out" in row else "-"
        kinds = [percent(row["left_out_kinds"].get(kind)) if "left_out" in row else "-" for kind in _kind_names(rows)]
        one, vote = row["one site"], row["vote"]
        lines.append(
            [_name(row), left, *kinds, percent(vote["mean"]), f"{100 * vote['margin']:.1f}", percent(one["mean"])]
        )
    headers = ["first pass", "left out", *_kind_names(rows), "routing, vote", "margin",
               f"routing, {paper_voter(context).site.name}"]  # fmt: skip
    places = list(grid(context))
    series = {f"vote, {m}": [r["vote"]["mean"] for r in rows if r["filter"] == m] for m in METRICS}
    series |= {f"one site, {m}": [r["one site"]["mean"] for r in rows if r["filter"] == m] for m in METRICS}
    cosine = [row for row in rows if row["filter"] == "cosine"]
    grid_of = [[row["left_out_tasks"][task] for row in cosine] for task in context.tasks]
    return [
        Table(headers, lines),
        Picture("redundancy", "Routing accuracy through the fixed model, by the filter's threshold.",
                plots.curves(places, series, xlabel="threshold ε of the filter", ylabel="routing accuracy, %")),
        Picture("redundancy-tasks", "Share of each task's matrices that the cosine filter leaves out, in recipe order.",
                plots.heat_map(context.tasks, [f"{x:g}" for x in places], grid_of, xlabel="threshold ε",
                               ylabel="tasks in recipe order")),
    ]  # fmt: skip


def _kind_names(rows: list[dict[str, Any]]) -> list[str]:
    return list(rows[1]["left_out_kinds"])


REDUNDANCY = Study(
    "redundancy", "The redundancy filter",
    "The paper's first pass runs a fixed model, the merge of all tasks that are not too similar to an earlier one. What "
    "does the filter leave out at thresholds from 0.05 to 0.9, by cosine and by principal angles, and does routing gain by "
    "it?",
    run, lambda context: context.seconds_for(len(METRICS) * len(grid(context)) + 2), here=PASSES,
)  # fmt: skip
