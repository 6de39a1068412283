"""`routers`: which router finds the task best, with and without data, from the base and from the fixed model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from massmerge.bundle.reader import Bundle
from massmerge.evaluation.plots import confusion
from massmerge.evaluation.report import Picture, Table
from massmerge.evaluation.results import count_routes
from massmerge.evaluation.summary import percent
from massmerge.model.answers import Routing
from massmerge.model.route.bases import SiteBases
from massmerge.model.route.first_pass import FirstPass, Voter
from massmerge.model.route.voters import site_router
from massmerge.recipe import Redundancy
from massmerge.research.studies import plots
from massmerge.research.studies.book import AnswerBook
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.figures import measure_answers, measure_routing, routed_rows
from massmerge.research.studies.fixed import accepted_tasks, fixed_about, fixed_pass
from massmerge.research.studies.scores import Scores, gather
from massmerge.research.studies.shipped import best_of, looks_of, routed, shipped_routings, shipped_voters
from massmerge.research.studies.study import Finding, Study, Verdict
from massmerge.routing.per_voter import PerVoter, VoterRouter
from massmerge.routing.projection import Score
from massmerge.routing.routers import ROUTERS as KINDS
from massmerge.routing.routers import find_router

SUPPORT = 16  # inputs of each task that routers with data are fitted on, as by `mass calibrate`
_PAPER_DEPTH = 0.8
FITTED = {name: kind.router for name, kind in KINDS.items() if isinstance(kind, PerVoter) and kind.needs_fit}
_NORMS = {"residual": "L2", "l1": "L1", "mahalanobis": "Mahalanobis", "energy": "energy"}
_MOST_MISTAKES = 3
CALIBRATED = "as the bundle is calibrated"


def run(context: StudyContext) -> Finding:
    """Route every sample by every router, then answer by the tasks that each has found."""
    scores, notes = _all_scores(context)
    default, own = _own(context)
    found = {default: shipped_routings(context)}
    rows: list[dict[str, Any]] = [{"router": default, "kind": own, "sites": "vote", "data": own == CALIBRATED}]
    for kind, per_voter in scores.items():
        for how, voters in {"vote": context.model.stages.voters, "one site": [paper_voter(context)]}.items():
            name = _name(kind, how, context)
            if name not in found and all(voter.name in per_voter for voter in voters):
                found[name] = _routings(context, kind, how, per_voter, voters)
                rows.append({"router": name, "kind": kind, "sites": how, "data": kind in FITTED})
    book = AnswerBook(context, context.model)
    chosen = {name: best_of(context, routings) for name, routings in found.items()}
    for row in rows:
        row["routing"] = measure_routing(context, chosen[row["router"]]).plain()
        row["answers"] = measure_answers(context, book.answers(found[row["router"]])).plain()
    rows.sort(key=lambda row: (-row["routing"]["mean"], row["router"] != default))
    return Finding(rows, _verdict(context, rows, chosen, default), _sentences(rows), _parts(context, rows, chosen, default),
                   notes=notes)  # fmt: skip


def _own(context: StudyContext) -> tuple[str, str]:
    """Name and kind of the row that is the bundle as it routes."""
    kind, options = Bundle(context.bundle, check=False).router_kind, context.model.stages.options
    if not find_router(kind).needs_fit:
        own = f"{options.first_pass} {options.score}"
        return _name(own, "vote", context), own
    return f"{kind}, vote, {CALIBRATED}", CALIBRATED


def _routings(
    context: StudyContext, kind: str, how: str, scores: Mapping[str, Tensor], voters: list[Voter]
) -> list[Routing]:
    """How another router would route every sample in the bundle's place."""
    stages = context.model.stages
    again = how == "vote" and kind.startswith("base")  # only these look again where they are not sure
    looks = looks_of(scores, voters, stages.second if again else None)
    return AnswerBook(context, context.model).settled(routed(stages, looks))


def paper_voter(context: StudyContext) -> Voter:
    """The paper's one site: what the MLP reads at about four fifths of the depth, the token that its models use."""
    sites = [site for site in context.model.sites if site.name[0] == "M" and site.name[1:].isdigit()]
    site = min(sites or context.model.sites, key=lambda one: abs(one.depth - _PAPER_DEPTH))
    return Voter(site, "cls" if any(v.token == "cls" for v in context.model.stages.voters) else "mean")


def _name(kind: str, how: str, context: StudyContext) -> str:
    where = "vote" if how == "vote" else paper_voter(context).site.name
    if kind in FITTED:
        return f"{kind}, {where}"
    first, score = kind.split()
    return f"projection from the {'base' if first == 'base' else 'fixed model'}, {_NORMS[score]}, {where}"


def _all_scores(context: StudyContext) -> tuple[Scores, list[str]]:
    """Scores of all routers from two passes: one of the base, one of the fixed model."""
    one = paper_voter(context)
    voters = list(dict.fromkeys([*shipped_voters(context), one]))
    projections = _projections(context, voters)
    fitted, notes = _fitted(context, voters)
    base: dict[str, Mapping[str, VoterRouter]] = {f"base {score}": routers for score, routers in projections.items()}
    about = {"voters": [v.name for v in voters], "scores": list(projections)}
    fits = {"fitted": list(fitted), "support": SUPPORT, "seed": context.settings.seed}
    found = gather(context, FirstPass(context.model.core.base, voters), {**base, **fitted},
                   {**about, **fits, "first_pass": "base"}, "through the base")  # fmt: skip
    given = Bundle(context.bundle, check=False).recipe.merge.redundancy
    accepted = accepted_tasks(context, given if isinstance(given, str) else Redundancy(**given.model_dump()))
    fixed = {f"fixed {score}": routers for score, routers in projections.items()}
    found |= gather(context, lambda: fixed_pass(context, accepted, voters), fixed, {**about, **fixed_about(accepted)},
                    "through the fixed model")  # fmt: skip
    return found, notes


def _projections(context: StudyContext, voters: list[Voter]) -> dict[Score, dict[str, VoterRouter]]:
    found: dict[Score, dict[str, VoterRouter]] = {}
    bases = SiteBases(context.model.sets.tensors)
    for score in get_args(Score):
        sites = {v.site: site_router(bases, v.site, score) for v in voters}
        found[score] = {v.name: sites[v.site] for v in voters}
    return found


def _fitted(context: StudyContext, voters: list[Voter]) -> tuple[dict[str, dict[str, VoterRouter]], list[str]]:
    """Routers that are fitted on a few inputs of each task, taken from rows that are not measured."""
    support = context.support(SUPPORT)
    without = [task for task in context.tasks if not support.get(task)]
    if without:
        return {}, [f"{', '.join(FITTED)} were left out: the suite has no rows of {', '.join(without)}."]
    owners = torch.tensor([t for t, task in enumerate(context.tasks) for _ in support[task]])
    rows = [context.model.read(item) for task in context.tasks for item in support[task]]
    first = FirstPass(context.model.core.base, voters)
    size = context.settings.batch_size
    parts = [first(context.model.core.batch(rows[at : at + size])) for at in range(0, len(rows), size)]
    found: dict[str, dict[str, VoterRouter]] = {kind: {} for kind in FITTED}
    for voter, seen in zip(voters, zip(*parts, strict=True), strict=True):
        z = torch.cat([activation.pooled() for activation in seen])
        residuals = site_router(SiteBases(context.model.sets.tensors), voter.site, context.model.stages.options.score)
        for kind, router in FITTED.items():
            found[kind][voter.name] = router.load(router.fit(z, owners, residuals), residuals)
    return found, []


def _verdict(context: StudyContext, rows: list[dict[str, Any]], chosen: Mapping[str, Tensor], default: str) -> Verdict:
    best, mass = rows[0], next(row for row in rows if row["router"] == default)
    ours, theirs = mass["routing"], best["routing"]
    why = ""
    if theirs["mean"] > ours["mean"]:
        seen = f"It was fitted on {SUPPORT} inputs of each task, MASS on none. " if best["data"] > mass["data"] else ""
        wrong = count_routes(routed_rows(context, chosen[default]), context.measured, context.tasks).worst(
            _MOST_MISTAKES
        )
        pairs = ", ".join(f"{task} to {other} ({percent(share)} of its rows)" for task, other, _, share in wrong)
        gains = {t: theirs["tasks"][t] - ours["tasks"][t] for t in ours["tasks"]}
        most = max(gains, key=lambda t: gains[t])
        why = (
            f"{seen}MASS's most frequent mistakes are {pairs}; the gap is largest on {most}, {percent(ours['tasks'][most])} "
            f"against {percent(theirs['tasks'][most])}."
        )
    return Verdict("routing accuracy, mean over the tasks", best["router"], theirs["mean"], default, ours["mean"],
                   max(ours["margin"], theirs["margin"]), why)  # fmt: skip


def _sentences(rows: list[dict[str, Any]]) -> list[str]:
    free = [row for row in rows if not row["data"]]
    sentences = [f"The best router without data is {free[0]['router']}: {percent(free[0]['routing']['mean'])}."]
    for first in ("base", "fixed"):
        best = next(row for row in free if row["kind"].startswith(first))
        sentences.append(
            f"Through the {'base' if first == 'base' else 'fixed model'} the best is {best['router']}: "
            f"{percent(best['routing']['mean'])}."
        )
    return sentences


def _parts(
    context: StudyContext, rows: list[dict[str, Any]], chosen: Mapping[str, Tensor], default: str
) -> list[Table | Picture]:
    lines = []
    for row in rows:
        routing, answers = row["routing"], row["answers"]
        lines.append([
            row["router"], _inputs(row), percent(routing["mean"]),
            f"{100 * routing['margin']:.1f}", percent(answers["mean"]), percent(answers["normalised"]),
            *(percent(routing["tasks"][task]) for task in context.measured),
        ])  # fmt: skip
    headers = ["router", "inputs per task", "routing", "margin", "answers", "normalised", *context.measured]
    bars = {row["router"]: (row["routing"]["mean"], row["routing"]["margin"]) for row in rows}
    matrix = count_routes(routed_rows(context, chosen[default]), context.measured, context.tasks)
    return [
        Table(headers, lines),
        Picture("routers", "Routing accuracy of each router, mean over the tasks, with its 95 % interval.",
                plots.ranked_bars(bars, default)),
        Picture("routers-confusion", f"Where the rows of each task go by {default}.", confusion(matrix)),
    ]  # fmt: skip


def _inputs(row: dict[str, Any]) -> str:
    """How many inputs of each task a router has been fitted on."""
    if row["kind"] == CALIBRATED:
        return "calibrated"
    return str(SUPPORT) if row["data"] else "none"


ROUTERS = Study(
    "routers", "Routers",
    "Which router finds the task of an input: projection on the tasks' singular vectors, which needs no data, or one "
    f"that is fitted on {SUPPORT} inputs of each task? From the base or from the fixed model, at one site or by a vote?",
    run, lambda context: context.seconds_for(3.5), needs_validation=True,
)  # fmt: skip
