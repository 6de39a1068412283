"""`sweep`: the threshold η and the greatest size K of a selected set; with `--search` also ε and the site."""

from __future__ import annotations

from typing import Any

from massmerge.evaluation.report import Part, Picture, Table
from massmerge.evaluation.summary import percent
from massmerge.research.studies import plots
from massmerge.research.studies.book import AnswerBook
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.figures import measure_answers
from massmerge.research.studies.search import Searched, search, search_parts, search_sentences
from massmerge.research.studies.shipped import shipped_looks, shipped_routings
from massmerge.research.studies.study import Finding, Study, Verdict

_THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 0.9)
_QUICK_THRESHOLDS = (0.1, 0.2, 0.3, 0.5)
_SIZES = (1, 2, 3, 4, 6, 8)
_QUICK_SIZES = (1, 2, 3)
SCORES = ("logit", "logit_and_weight")
_WORDS = {"logit": "the highest logit answers", "logit_and_weight": "logit and router's weight answer",
          "probability": "the highest probability answers", "text": "the set writes"}  # fmt: skip


def run(context: StudyContext) -> Finding:
    """Answer every sample with every set that some η and K would select; the grid is then looked up."""
    looks = shipped_looks(context)
    rows: list[dict[str, Any]] = []
    for score in scores(context):
        for threshold in thresholds(context):
            for size in sizes(context):
                model = context.with_options(router={"threshold": threshold, "top_k": size}, answer={"score": score})
                routings = shipped_routings(context, looks, model)
                found = measure_answers(context, AnswerBook(context, model).answers(routings))
                mean_size = sum(len(routing.selected) for routing in routings) / len(routings)
                rows.append({"score": score, "threshold": threshold, "top_k": size, "set": round(mean_size, 4),
                             **found.plain()})  # fmt: skip
    parts = _parts(context, rows)
    sentences = _sentences(context, rows)
    if context.settings.options.get("search"):
        searched = search(context, int(context.settings.options.get("trials") or 40))
        rows += searched.rows
        parts += search_parts(searched)
        sentences += search_sentences(searched)
        return Finding(rows, _searched_verdict(searched), sentences, parts)
    return Finding(rows, _verdict(context, rows), sentences, parts)


def thresholds(context: StudyContext) -> tuple[float, ...]:
    """η, the bundle's own among them: above 0.5 all are the same, since two tasks never both weigh that much."""
    wanted = _QUICK_THRESHOLDS if context.settings.quick else _THRESHOLDS
    return tuple(sorted({*wanted, context.model.stages.options.threshold}))


def sizes(context: StudyContext) -> list[int]:
    """K, the bundle's own among them, up to the number of tasks."""
    wanted = {*(_QUICK_SIZES if context.settings.quick else _SIZES), context.model.top_k}
    return sorted({min(size, len(context.tasks)) for size in wanted})


def scores(context: StudyContext) -> list[str]:
    """By what heads are compared: as the bundle does, and both ways that were measured best."""
    if context.ready.writes:  # a set writes one text
        return ["text"]
    return list(dict.fromkeys((context.model.core.options.score, *SCORES)))


def _own(context: StudyContext, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row that is the bundle's setting."""
    size = min(context.model.top_k, len(context.tasks))
    own = scores(context)[0], context.model.stages.options.threshold, size
    return next(row for row in rows if (row["score"], row["threshold"], row["top_k"]) == own)


def _name(row: dict[str, Any]) -> str:
    return f"η {row['threshold']:g}, K {row['top_k']}, {row['score']}"


def _verdict(context: StudyContext, rows: list[dict[str, Any]]) -> Verdict:
    own = _own(context, rows)
    best = max(rows, key=lambda row: (row["mean"], row is own))
    gains = {task: best["tasks"][task] - own["tasks"][task] for task in own["tasks"]}
    most = max(gains, key=lambda task: gains[task])
    why = "" if best["mean"] <= own["mean"] else (
        f"With {best['set']:.2f} tasks per set on average the second pass can still answer what the router ranks second: "
        f"{most} gains most, {percent(own['tasks'][most])} to {percent(best['tasks'][most])}. The cell is the best of "
        f"{len(rows)} that were tried on these rows."
    )  # fmt: skip
    return Verdict("accuracy of the answers, mean over the tasks", _name(best), best["mean"], _name(own), own["mean"],
                   max(own["margin"], best["margin"]), why)  # fmt: skip


def _searched_verdict(found: Searched) -> Verdict:
    why = "" if found.found["mean"] <= found.default["mean"] else (
        f"The search has seen {found.samples:,} labelled rows of the split validation and tried {found.trials} settings; "
        "the default has seen none."
    )  # fmt: skip
    return Verdict("accuracy of the answers, mean over the tasks", "the setting found by search on the split validation",
                   found.found["mean"], "defaults", found.default["mean"],
                   max(found.found["margin"], found.default["margin"]), why)  # fmt: skip


def _sentences(context: StudyContext, rows: list[dict[str, Any]]) -> list[str]:
    sentences = []
    for score in scores(context):
        own = [row for row in rows if row["score"] == score]
        best = max(own, key=lambda row: row["mean"])
        one = next(row for row in own if row["top_k"] == 1)
        three = [row for row in own if row["top_k"] == min(3, max(sizes(context)))]
        paper = min(three, key=lambda row: abs(row["threshold"] - 0.2))
        sentences.append(
            f"Where {_WORDS[score]}: one task gives {percent(one['mean'])}, the paper's η 0.2 with K {paper['top_k']} "
            f"{percent(paper['mean'])} with {paper['set']:.2f} tasks per set, the best cell ({_name(best)}) "
            f"{percent(best['mean'])}."
        )
    return sentences


def _parts(context: StudyContext, rows: list[dict[str, Any]]) -> list[Part]:
    parts: list[Part] = []
    names = [f"{threshold:g}" for threshold in thresholds(context)]
    for score in scores(context):
        own = [row for row in rows if row["score"] == score]
        grid = [[row["mean"] for row in own if row["top_k"] == size] for size in sizes(context)]
        lines = [[f"K {size}", *map(percent, line)] for size, line in zip(sizes(context), grid, strict=True)]
        parts.append(Table([f"{score}: accuracy by η", *names], lines))
        mark = None
        if score == scores(context)[0]:
            row = _own(context, rows)
            mark = (sizes(context).index(row["top_k"]), thresholds(context).index(row["threshold"]))
        figure = plots.heat_map([f"K {size}" for size in sizes(context)], names, grid, mark=mark,
                                xlabel="threshold η", ylabel="at most K tasks per set")  # fmt: skip
        frame = "; the frame is the bundle's own setting" if mark else ""
        parts.append(Picture(f"sweep-{score}", f"Accuracy in % where {_WORDS[score]}{frame}.", figure))
    return parts


SWEEP = Study(
    "sweep", "Threshold and size of the selected set",
    "How do accuracy of the answers and the threshold η of the router's weights, and the greatest size K of a set, hang "
    "together? With --search a Bayesian search looks for the best η, K, ε and site on the split validation.",
    run, lambda context: context.seconds_for(4.0),
)  # fmt: skip
