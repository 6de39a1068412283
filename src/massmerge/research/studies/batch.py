"""`batch`: what a decision gains that several inputs of one task share."""

from __future__ import annotations

from typing import Any

import torch

from massmerge.evaluation.data import batches_of_one_task
from massmerge.evaluation.report import Picture, Table
from massmerge.evaluation.summary import percent
from massmerge.model.answers import Routing
from massmerge.model.route.stages import BATCH_PROBES
from massmerge.research.studies import plots
from massmerge.research.studies.book import AnswerBook
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.figures import measure_answers, measure_routing
from massmerge.research.studies.shipped import Looks, best_of, routed, shipped_looks, shipped_routings
from massmerge.research.studies.study import Finding, Study, Verdict

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_QUICK = (1, 4, 16)
ALL_INPUTS, PROBES = "all inputs decide", f"the first {BATCH_PROBES} decide"


def run(context: StudyContext) -> Finding:
    """Share each decision among batches of growing size; what voters say of each sample is looked up."""
    looks = shipped_looks(context)
    rows = [_row(context, looks, size, probes) for size in sizes(context) for probes in (None, BATCH_PROBES)]
    return Finding(rows, _verdict(context, rows), _sentences(rows), _parts(context, rows))


def sizes(context: StudyContext) -> list[int]:
    """Batch sizes that the tasks have rows for: up to the first that holds all rows of the largest."""
    most = max(context.ready.counts.values())
    wanted = _QUICK if context.settings.quick else _SIZES
    return [size for at, size in enumerate(wanted) if at == 0 or wanted[at - 1] < most]


def batch_routings(context: StudyContext, looks: Looks, size: int, probes: int | None) -> list[Routing]:
    """Routings of samples in batches of one task, by one decision a batch; alone, each sample has its own.

    Args:
        context: the study's.
        looks: what the bundle's voters say of every sample.
        size: of the batches.
        probes: how many inputs of a batch decide; all of them without it.
    """
    if size == 1:
        return shipped_routings(context, looks)
    first = dict(zip(context.measured, _starts(context), strict=True))
    found: dict[int, Routing] = {}
    for batch in batches_of_one_task(context.ready.counts, size, context.settings.seed):
        places = [first[task] + place for task, place in batch]
        decide = torch.tensor(places[:probes])
        (routing,) = routed(context.model.stages, looks, decide, shared=True)
        found |= dict.fromkeys(places, routing)
    return [found[place] for place in range(len(context.samples))]


def _starts(context: StudyContext) -> list[int]:
    counts = list(context.ready.counts.values())
    return [sum(counts[:at]) for at in range(len(counts))]


def _row(context: StudyContext, looks: Looks, size: int, probes: int | None) -> dict[str, Any]:
    routings = batch_routings(context, looks, size, probes)
    return {
        "size": size,
        "decides": ALL_INPUTS if probes is None else PROBES,
        "routing": measure_routing(context, best_of(context, routings)).plain(),
        "answers": measure_answers(context, AnswerBook(context, context.model).answers(routings)).plain(),
    }


def _verdict(context: StudyContext, rows: list[dict[str, Any]]) -> Verdict:
    own = rows[0]
    best = max(rows, key=lambda row: row["answers"]["mean"])
    ours, theirs = own["answers"], best["answers"]
    why = "" if theirs["mean"] <= ours["mean"] else (
        f"A shared decision averages the noise of its inputs: routing rises from {percent(own['routing']['mean'])} to "
        f"{percent(best['routing']['mean'])}. It needs to be known that the inputs of a batch are of one task."
    )  # fmt: skip
    mass = "a decision for each input"
    name = mass if best is own else f"batches of {best['size']}, {best['decides']}"
    return Verdict("accuracy of the answers, mean over the tasks", name, theirs["mean"], mass, ours["mean"],
                   max(ours["margin"], theirs["margin"]), why)  # fmt: skip


def _sentences(rows: list[dict[str, Any]]) -> list[str]:
    shared = [row for row in rows if row["decides"] == ALL_INPUTS]
    perfect = next((row for row in shared if row["routing"]["mean"] >= 0.99), None)
    last = shared[-1]
    if perfect is None:
        return [
            f"With {last['size']} inputs per decision {percent(last['routing']['mean'])} of inputs go to their own task."
        ]
    if perfect["size"] == 1:
        return ["Decided one by one, 99 % of inputs go to their own task already."]
    return [f"From {perfect['size']} inputs per decision on, 99 % of inputs go to their own task."]


def _parts(context: StudyContext, rows: list[dict[str, Any]]) -> list[Table | Picture]:
    lines = [
        [str(row["size"]), row["decides"], percent(row["routing"]["mean"]), percent(row["answers"]["mean"]),
         f"{100 * row['answers']['margin']:.1f}", percent(row["answers"]["normalised"]),
         *(percent(row["answers"]["tasks"][task]) for task in context.measured)]
        for row in rows
    ]  # fmt: skip
    headers = ["inputs per decision", "deciding", "routing", "answers", "margin", "normalised", *context.measured]
    series = {
        f"{what}, {decides}": [row[what]["mean"] for row in rows if row["decides"] == decides]
        for what in ("routing", "answers")
        for decides in (ALL_INPUTS, PROBES)
    }
    return [
        Table(headers, lines),
        Picture("batch", "Accuracy when one decision is shared by inputs of one task.",
                plots.curves(sizes(context), series, xlabel="inputs that share a decision", ylabel="accuracy, %",
                             logarithmic=True)),
    ]  # fmt: skip


BATCH = Study(
    "batch", "Shared decisions",
    "What does routing gain when one decision is shared by 1, 2, 4 … 128 inputs of one task? All of them decide together, "
    f"or the first {BATCH_PROBES} for the others, as `route=\"batch\"` does.",
    run, lambda context: context.seconds_for(2.3),
)  # fmt: skip
