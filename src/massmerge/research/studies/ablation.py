"""`ablation`: the merge inside a set, and how ranks are chosen."""

from __future__ import annotations

from typing import Any, get_args

from massmerge.bundle.reader import Bundle
from massmerge.evaluation.report import Part, Picture, Table
from massmerge.evaluation.summary import percent
from massmerge.model.answers import Routing
from massmerge.recipe import MergeKind, MergeOptions, Recipe
from massmerge.research.studies import plots
from massmerge.research.studies.book import AnswerBook
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.figures import measure_answers, measure_routing
from massmerge.research.studies.shipped import Looks, best_of, shipped_looks, shipped_routings
from massmerge.research.studies.study import Finding, Study, Verdict

_SIZES = (2, 3)
_SCORES = ("logit", "logit_and_weight")
_RULES: tuple[dict[str, Any], ...] = ({"budget": 1.5}, {"budget": 2.0}, {"budget": 3.0}, {"rank": "1/T"})
_QUICK_RULES: tuple[dict[str, Any], ...] = ({"budget": 2.0}, {"rank": "1/T"})


def run(context: StudyContext) -> Finding:
    """Answer with each merge of a set; then merge the experts by each rule for ranks, and answer with each bundle."""
    rows = _merge_rows(context)
    notes = []
    if context.has_recipe:
        rows += [_rank_row(context, rule) for rule in (_QUICK_RULES if context.settings.quick else _RULES)]
    else:
        notes.append("ranks were left out: the experts are merged again for them, which --recipe recipe.yaml names.")
    return Finding(rows, _verdict(context, rows), _sentences(rows), _parts(context, rows), notes=notes)


def _merge_rows(context: StudyContext) -> list[dict[str, Any]]:
    """A row for one task per set, where nothing is merged, and one for each merge, size and way to compare heads."""
    looks, own = shipped_looks(context), context.model
    found = [_merge_row(context, looks, "one task, nothing to merge", 1, own.core.options.score)]
    for kind in get_args(MergeKind):
        for size in _sizes(context):
            for score in _scores(context):
                found.append(_merge_row(context, looks, kind, size, score))
    return found


def _sizes(context: StudyContext) -> list[int]:
    """K of sets in which there is something to merge, the bundle's own among them."""
    return sorted({size for size in (*_SIZES, _own_size(context)) if 1 < size <= len(context.tasks)})


def _own_size(context: StudyContext) -> int:
    return min(context.model.top_k, len(context.tasks))


def _scores(context: StudyContext) -> list[str]:
    """By what heads are compared: both ways that were measured best, and the bundle's own."""
    return list(dict.fromkeys((*_SCORES, context.model.core.options.score)))


def _merge_row(context: StudyContext, looks: Looks, merge: str, size: int, score: str) -> dict[str, Any]:
    answer = {"score": score, **({"merge": merge} if size > 1 else {})}
    model = context.with_options(router={"top_k": size}, answer=answer)
    routings = shipped_routings(context, looks, model)
    answers = AnswerBook(context, model).answers(routings)
    return {
        "part": "merge", "merge": merge, "top_k": size, "score": score,
        "set": round(sum(len(r.selected) for r in routings) / len(routings), 4),
        **measure_answers(context, answers).plain(),
    }  # fmt: skip


def _rank_row(context: StudyContext, rule: dict[str, Any]) -> dict[str, Any]:
    """A bundle whose ranks are chosen by a rule: its bytes, and how it answers."""
    given = context.recipe
    keep = {k: v for k, v in given.merge.model_dump().items() if k not in ("budget", "rank")}
    merge = MergeOptions.model_validate({**keep, "method": "mass", **rule})
    path = context.merged(Recipe.model_validate({**given.model_dump(exclude={"merge"}), "merge": merge.model_dump()}))
    bundle = Bundle(path, check=False)
    other = context.with_bundle(path)
    other.__dict__["references"] = context.references
    routings, book = shipped_routings(other), AnswerBook(other, other.model)
    owners = [_given(sample.task) for sample in other.samples]
    name, value = next(iter(rule.items()))
    return {
        "part": "rank", "rule": f"{name}: {value}", "bytes": bundle.counted_bytes,
        "ratio": round(bundle.counted_bytes / bundle.base_bytes, 4),
        "routing": measure_routing(other, best_of(other, routings)).plain(),
        "known": measure_answers(other, book.answers(owners)).plain(),
        **measure_answers(other, book.answers(routings)).plain(),
    }  # fmt: skip


def _given(task: str) -> Routing:
    return Routing({}, {task: 1.0}, [task], "")


def _name(row: dict[str, Any]) -> str:
    return row["merge"] if row["top_k"] == 1 else f"{row['merge']}, K {row['top_k']}, {row['score']}"


def _own(context: StudyContext, merges: list[dict[str, Any]]) -> dict[str, Any]:
    """The row that is the bundle as it answers."""
    options, size = context.model.core.options, _own_size(context)
    wanted = (size, options.score, options.merge)
    return merges[0] if size == 1 else next(r for r in merges if (r["top_k"], r["score"], r["merge"]) == wanted)


def _verdict(context: StudyContext, rows: list[dict[str, Any]]) -> Verdict:
    merges = [row for row in rows if row["part"] == "merge"]
    own, best = _own(context, merges), max(merges, key=lambda row: row["mean"])
    gains = {task: best["tasks"][task] - own["tasks"][task] for task in own["tasks"]}
    most = max(gains, key=lambda task: gains[task])
    why = "" if best["mean"] <= own["mean"] else (
        f"Sets of {best['set']:.2f} tasks on average let the heads correct the router, on {most} most: "
        f"{percent(own['tasks'][most])} to {percent(best['tasks'][most])}."
    )  # fmt: skip
    return Verdict("accuracy of the answers, mean over the tasks", _name(best), best["mean"], _name(own),
                   own["mean"], max(own["margin"], best["margin"]), why)  # fmt: skip


def _sentences(rows: list[dict[str, Any]]) -> list[str]:
    sentences = []
    for score in _SCORES:
        own = [row for row in rows if row["part"] == "merge" and row["top_k"] > 1 and row["score"] == score]
        if own:
            size = max(row["top_k"] for row in own)
            parts = ", ".join(f"{row['merge']} {percent(row['mean'])}" for row in own if row["top_k"] == size)
            sentences.append(f"Merges of up to {size} tasks, heads compared by {score}: {parts}.")
    for row in rows:
        if row["part"] == "rank":
            sentences.append(
                f"Ranks by {row['rule']}: {row['ratio']:.2f} times the base, {percent(row['mean'])} of answers right, "
                f"{percent(row['known']['mean'])} with the task given."
            )
    return sentences


def _parts(context: StudyContext, rows: list[dict[str, Any]]) -> list[Part]:
    merges = [row for row in rows if row["part"] == "merge"]
    lines = [
        [_name(row), f"{row['set']:.2f}", percent(row["mean"]), f"{100 * row['margin']:.1f}", percent(row["normalised"]),
         *(percent(row["tasks"][task]) for task in context.measured)]
        for row in merges
    ]  # fmt: skip
    headers = ["merge inside a set", "tasks per set", "answers", "margin", "normalised", *context.measured]
    bars = {_name(row): (row["mean"], row["margin"]) for row in merges}
    parts: list[Part] = [
        Table(headers, lines),
        Picture("ablation", "Accuracy of the answers by the merge inside a set, with its 95 % interval.",
                plots.ranked_bars(bars, _name(_own(context, merges)))),
    ]  # fmt: skip
    ranks = [row for row in rows if row["part"] == "rank"]
    if ranks:
        lines = [
            [row["rule"], f"{row['bytes'] / 1e6:.1f} MB", f"{row['ratio']:.2f}", percent(row["routing"]["mean"]),
             percent(row["mean"]), f"{100 * row['margin']:.1f}", percent(row["normalised"]), percent(row["known"]["mean"])]
            for row in ranks
        ]  # fmt: skip
        headers = ["ranks", "bytes", "times the base", "routing", "answers", "margin", "normalised", "task given"]
        parts.append(Table(headers, lines))
    return parts


def _seconds(context: StudyContext) -> float:
    rules = len(_QUICK_RULES if context.settings.quick else _RULES) if context.has_recipe else 0
    merging = rules * context.merge_seconds if rules else 0.0
    return context.seconds_for(4.5 + 2.5 * rules) + merging


ABLATION = Study(
    "ablation", "Merges inside a set, and ranks",
    "What do the parts of the second pass contribute: the orthogonalised merge inside a selected set against the same "
    "weighted by the router and against a plain sum, and ranks that fill a budget of bytes against the paper's 1/T of the "
    "full rank?",
    run, _seconds,
)  # fmt: skip
