"""`leave_one_out`: a task that was not merged, answered with its own head."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from massmerge.evaluation.from_recipe import open_answering
from massmerge.evaluation.report import Picture, Table
from massmerge.evaluation.summary import percent
from massmerge.model.answers import Prediction
from massmerge.model.core import Core
from massmerge.model.load import load
from massmerge.model.model import Model
from massmerge.model.unrouted import OneBackbone
from massmerge.recipe import Unknown
from massmerge.research.studies import plots
from massmerge.research.studies.compared import answers_of, routed_outcomes
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.figures import Measured, summarize
from massmerge.research.studies.methods import BASE, EXPERTS, MASS
from massmerge.research.studies.statics import StaticMerge, subset
from massmerge.research.studies.study import TIMED, Finding, Study, Verdict

_STATICS = ("task_arithmetic", "tsv_m")


class LentHead:
    """A bundle that answers with the head of a task that it does not have: routed to its own tasks, read by that head.

    Args:
        model: the bundle.
        lender: has the head.
        task: whose head it is.
    """

    nbytes = 0  # not compared here

    def __init__(self, model: Model, lender: Core, task: str) -> None:
        self._model, self._lender, self._task = model, lender, task

    def outcomes(
        self, inputs: Sequence[Any], tasks: Sequence[str], *, batch_size: int = 32
    ) -> list[tuple[Prediction, Prediction]]:
        """For each input the answer of the lent head; there is none without it."""
        found: list[Prediction] = []
        stages = self._model.stages
        for batch in self._model.core.batches(inputs, batch_size):
            routings, _ = stages.route(batch, stages.choice(unknown=Unknown()))
            passed = self._model.sets.forward(batch, routings)
            found += passed.back(self._lender.answers(passed.output, passed.batch, [self._task] * len(routings)))
        return [(Prediction(None), answer) for answer in found]


def run(context: StudyContext) -> Finding:
    """Merge all tasks but one, by each method, and answer the rows of that one with its own head."""
    answering = open_answering(context.sources)
    tasks = left_out(context)
    shares: dict[str, dict[str, float]] = {name: {} for name in (BASE, *_STATICS, MASS)}
    for task in tasks:
        made: list[Path] = []
        for name in shares:
            about = {"left_out": task, "recipe": context.recipe.dump()}
            make = partial(_make, context, answering, name, task, made)
            shares[name][task] = context.figure(task, answers_of(context, name, about, make, [task]).given)
        for path in made:  # their answers are what is kept
            shutil.rmtree(path, ignore_errors=True)
    references = {task: context.references[task] for task in tasks}
    found = {name: summarize(one, context.ready.counts, references) for name, one in shares.items()}
    found[EXPERTS] = summarize(references, context.ready.counts, references)
    rows = [{"method": name, "head": "given", **one.plain()} for name, one in found.items()]
    sentences = _sentences(tasks, found, writes=context.ready.writes)
    return Finding(rows, _verdict(tasks, found), sentences, _parts(tasks, found))


def left_out(context: StudyContext) -> list[str]:
    """The tasks that are left out, one after the other."""
    return context.measured[:1] if context.settings.quick else context.measured


def _make(context: StudyContext, answering: Core, name: str, task: str, made: list[Path]) -> Any:
    """A method's merge of all tasks but one, with the heads of all; where it lies is added to `made`."""
    others = [other for other in context.tasks if other != task]
    if name == BASE:
        return OneBackbone(answering, 0)
    if name == MASS:
        made.append(context.merged(subset(context.recipe, others)))
        model = load(made[-1], router="projection", **context.where, check=True)
        return routed_outcomes(model, 0) if context.ready.writes else LentHead(model, answering, task)
    merge = StaticMerge(context, name, others)
    made.append(merge.model.path)
    scale, _ = merge.scale
    if scale is not None:
        merge.set_scale(scale)
    return OneBackbone(replace(answering, base=merge.model.backbone), 0)


# What a reader sees


def _over(tasks: list[str]) -> str:
    """What a figure is of: one task has no mean."""
    return "mean over the tasks" if len(tasks) > 1 else tasks[0]


def _verdict(tasks: list[str], found: dict[str, Measured]) -> Verdict:
    rivals = {name: one for name, one in found.items() if name != EXPERTS}
    best = max(rivals, key=lambda name: rivals[name].mean)
    ours, theirs = rivals[MASS], rivals[best]
    why = ""
    if theirs.mean > ours.mean:
        why = (
            "MASS gives an input the updates of the few tasks that it is routed to; none of them was trained for it. "
            f"The pretrained model has {percent(rivals[BASE].mean)}."
        )
    return Verdict(
        f"accuracy on a task that was left out, its head given, {_over(tasks)}", best, theirs.mean, MASS, ours.mean,
        max(ours.margin, theirs.margin), why,
    )  # fmt: skip


def _sentences(tasks: list[str], found: dict[str, Measured], *, writes: bool) -> list[str]:
    gain = found[MASS].mean - found[BASE].mean
    one = [f"A quick run leaves out one task, {tasks[0]}; others may differ."] if len(tasks) == 1 else []
    about = (
        "Texts are written by what was merged of the other tasks."
        if writes
        else "The head of the task that is left out was trained on its own expert's features, and is given: "
        "nothing here can "
        "be answered by a bundle that does not have the task."
    )
    return [
        *one,
        about,
        f"MASS {'adds' if gain >= 0 else 'takes'} {100 * abs(gain):.1f} points {'to' if gain >= 0 else 'from'} what the "
        f"pretrained model has with the same heads, {percent(found[BASE].mean)}; the experts have "
        f"{percent(found[EXPERTS].mean)}.",
    ]


def _parts(tasks: list[str], found: dict[str, Measured]) -> list[Table | Picture]:
    several = tasks if len(tasks) > 1 else []
    lines = [
        [name, percent(one.mean), percent(one.normalised), *(percent(one.tasks[task]) for task in several)]
        for name, one in found.items()
    ]
    bars = {name: (one.mean, one.margin) for name, one in found.items()}
    return [
        Table(["merged without the task, by", "mean" if several else tasks[0], "normalised", *several], lines),
        Picture("leave-one-out", f"Accuracy on the task that was left out, its own head given; {_over(tasks)}.",
                plots.ranked_bars(bars, MASS)),
    ]  # fmt: skip


def _seconds(context: StudyContext) -> float:
    return context.seconds_for(6) + 3 * len(left_out(context)) * context.merge_seconds


LEAVE_ONE_OUT = Study(
    "leave_one_out", "A task that was not merged",
    "What do the other tasks' updates do for a task that is not among them? Each task is left out of the merge, and its "
    "rows are answered with its own head, which is given.",
    run, _seconds, needs_recipe=True, here=TIMED,
    quick=("A task that was not merged",
           "What do the other tasks' updates do for a task that is not among them? The first task of the suite is left out "
           "of the merge, and its rows are answered with its own head, which is given."),
)  # fmt: skip
