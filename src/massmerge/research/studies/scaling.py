"""`scaling`: what becomes of MASS and of static merges as tasks are added."""

from __future__ import annotations

from functools import partial
from typing import Any

from massmerge.bundle.reader import Bundle
from massmerge.evaluation.report import Picture, Table
from massmerge.evaluation.summary import percent
from massmerge.merging.static import STATIC_METHODS
from massmerge.model.load import load
from massmerge.research.studies import plots
from massmerge.research.studies.compared import mass_answers
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.figures import Measured
from massmerge.research.studies.methods import MASS
from massmerge.research.studies.statics import StaticMerge, subset
from massmerge.research.studies.study import TIMED, Finding, Study, Verdict

_SUM = "task_arithmetic"
_QUICK_RIVALS = ("tsv_m",)


def run(context: StudyContext) -> Finding:
    """Merge the first 2, 3, … T tasks by each method, and measure them."""
    best = best_static(context)
    rows: list[dict[str, Any]] = []
    for count in counts(context):
        tasks = [task.name for task in context.recipe.tasks][:count]
        rows.append(_row(count, MASS, "unknown", _mass(context, tasks)))
        for method in dict.fromkeys((best, _SUM)):
            found = StaticMerge(context, method, tasks).answers().answered
            rows.append(_row(count, method, "given", found.measure(context, given=True)))
            rows.append(_row(count, method, "unknown", found.measure(context, given=False)))
    return Finding(rows, _verdict(context, rows, best), _sentences(context, rows, best), _parts(context, rows, best))


def counts(context: StudyContext) -> list[int]:
    """How many tasks are merged: from 2 to all, at most eight steps."""
    most = len(context.tasks)
    if context.settings.quick or most <= 3:
        return sorted({min(2, most), most})
    if most <= 9:
        return list(range(2, most + 1))
    return sorted({round(2 + (most - 2) * step / 7) for step in range(8)})


def best_static(context: StudyContext) -> str:
    """The static merge that does best on all tasks with the task given; it is chosen on the measured rows, in its favour."""
    methods = _QUICK_RIVALS if context.settings.quick else STATIC_METHODS
    found = {name: StaticMerge(context, name).answers().answered.measure(context, given=True).mean for name in methods}
    rivals = {name: mean for name, mean in found.items() if name != _SUM} or found
    return max(rivals, key=rivals.__getitem__)


def _mass(context: StudyContext, tasks: list[str]) -> Measured:
    """A bundle of some tasks, on the samples of those, without their names."""
    whole = len(tasks) == len(context.tasks)
    path = context.bundle if whole else context.merged(subset(context.recipe, tasks))
    about = {} if whole else {"bundle_of": subset(context.recipe, tasks).dump()}
    measured = [task for task in context.measured if task in tasks]
    size = Bundle(path, check=False).counted_bytes
    found, _ = mass_answers(context, partial(load, path, check=True), about, size, measured)
    return found.measure(context, given=False)


def _row(count: int, method: str, task: str, found: Measured) -> dict[str, Any]:
    return {"tasks_merged": count, "method": method, "task": task, **found.plain()}


def _series(rows: list[dict[str, Any]], best: str) -> dict[str, list[dict[str, Any]]]:
    """The lines that are compared, MASS first."""
    lines = {
        "MASS, task unknown": (MASS, "unknown"), f"{best}, task given": (best, "given"),
        f"{_SUM}, task given": (_SUM, "given"), f"{best}, task unknown": (best, "unknown"),
    }  # fmt: skip
    return {name: [r for r in rows if (r["method"], r["task"]) == wanted] for name, wanted in lines.items()}


def _verdict(context: StudyContext, rows: list[dict[str, Any]], best: str) -> Verdict:
    last = {name: found[-1] for name, found in _series(rows, best).items()}
    ours = last["MASS, task unknown"]
    top = max(last, key=lambda name: last[name]["mean"])
    theirs = last[top]
    why = ""
    if theirs["mean"] > ours["mean"]:
        why = "A static merge is given the task here, MASS is not."
    return Verdict(
        f"accuracy with {ours['tasks_merged']} tasks merged, mean over the tasks", top, theirs["mean"],
        "MASS, task unknown", ours["mean"], max(ours["margin"], theirs["margin"]), why,
    )  # fmt: skip


def _sentences(context: StudyContext, rows: list[dict[str, Any]], best: str) -> list[str]:
    found = []
    for name, line in _series(rows, best).items():
        first, last = line[0], line[-1]
        found.append(
            f"{name}: {percent(first['mean'])} with {first['tasks_merged']} tasks, {percent(last['mean'])} with "
            f"{last['tasks_merged']}; normalised {percent(first['normalised'])} and {percent(last['normalised'])}."
        )
    found.append(
        "Tasks are added in the recipe's order, and each merge is measured on its own tasks, so figures of different "
        "numbers of tasks are of different rows; normalised figures are divided by the experts' on the same rows."
    )
    return found


def _parts(context: StudyContext, rows: list[dict[str, Any]], best: str) -> list[Table | Picture]:
    lines = _series(rows, best)
    places = [row["tasks_merged"] for row in lines["MASS, task unknown"]]
    shown = "normalised" if all(row["normalised"] is not None for row in rows) else "mean"
    table = [
        [
            str(place),
            *(cell for line in lines.values() for cell in (percent(line[at]["mean"]), percent(line[at][shown]))),
        ]
        for at, place in enumerate(places)
    ]
    headers = ["tasks", *(name for line in lines for name in (line, "normalised"))]
    return [
        Table(headers, table),
        Picture("scaling", f"Accuracy ({shown}) as tasks are added, mean over the merged tasks.",
                plots.curves(places, {name: [row[shown] for row in line] for name, line in lines.items()},
                             xlabel="tasks that are merged", ylabel=f"accuracy, {shown}, %")),
    ]  # fmt: skip


def _seconds(context: StudyContext) -> float:
    steps = len(counts(context))
    return context.seconds_for(len(STATIC_METHODS) + 4 * steps) + 3 * steps * context.merge_seconds


SCALING = Study(
    "scaling", "More and more tasks",
    "How much is lost as tasks are added? The first 2, 3, … T tasks of the recipe are merged by MASS, by task "
    "arithmetic and by the best static merge, and measured on the rows of those tasks.",
    run, _seconds, needs_recipe=True, here=TIMED,
    quick=("Two tasks, and all",
           "How much is lost as tasks are added? The first 2 and all tasks of the recipe are merged by MASS, by task "
           f"arithmetic and by {_QUICK_RIVALS[0]}, and measured on the rows of those tasks."),
)  # fmt: skip
