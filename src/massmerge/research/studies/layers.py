"""`layers`: how well inputs find their task at every site of the network."""

from __future__ import annotations

import re

from massmerge.evaluation.report import Picture, Table
from massmerge.evaluation.summary import percent
from massmerge.model.route.first_pass import Token, Voter
from massmerge.research.studies import plots
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.figures import Measured, measure_routing
from massmerge.research.studies.fixed import own_accepted, pass_scores
from massmerge.research.studies.scores import best_tasks
from massmerge.research.studies.shipped import best_of, shipped_routings, shipped_voters
from massmerge.research.studies.study import PASSES, Finding, Study, Verdict

_WORDS = {"A": "what attention reads", "O": "what attention's output layer reads",
          "M": "what the MLP reads", "D": "what the MLP's output layer reads"}  # fmt: skip
VOTE = "vote of the bundle's voters"
_WIDEST = 30  # sites in one picture


def run(context: StudyContext) -> Finding:
    """Route every sample at every site by itself, from one pass, and as the bundle does."""
    voters = all_voters(context)
    scores = pass_scores(context, own_accepted(context), voters)
    found = {voter.name: measure_routing(context, best_tasks(scores, [voter])) for voter in voters}
    together = measure_routing(context, best_of(context, shipped_routings(context)))
    best = max(found, key=lambda name: found[name].mean)
    rows = [
        {"site": v.site.name, "token": v.token, "depth": round(v.site.depth, 4), **found[v.name].plain()}
        for v in voters
    ]
    rows.append({"site": VOTE, "token": None, "depth": max(v.site.depth for v in context.model.stages.voters),
                 **together.plain()})  # fmt: skip
    return Finding(rows, _verdict(context, best, found[best], together), _sentences(voters, found, together),
                   [_table(context, voters, found, together), *_pictures(context, voters, found, together)])  # fmt: skip


def all_voters(context: StudyContext) -> list[Voter]:
    """Every site of a numbered block with each token that a vector can be made of."""
    sites = [site for site in context.model.sites if re.fullmatch(r"[AOMD]\d+", site.name)]
    tokens: tuple[Token, ...] = (
        ("cls", "mean") if any(v.token == "cls" for v in context.model.stages.voters) else ("mean",)
    )
    chosen = [Voter(site, token) for site in sites for token in tokens]
    # Whatever else votes in the bundle has its row too.
    return chosen + [v for v in shipped_voters(context) if v not in chosen]


def _verdict(context: StudyContext, best: str, alone: Measured, together: Measured) -> Verdict:
    own = context.model.stages.voters
    voters = f"{len(own)} voters, {own[0].name} to {own[-1].name}"
    voters += ", and a second look where they are not sure" if context.model.stages.second else ""
    why = ""
    if alone.mean > together.mean:
        better = sum(share > together.tasks[task] for task, share in alone.tasks.items())
        worse = sum(share < together.tasks[task] for task, share in alone.tasks.items())
        why = (
            f"The site {best} can only be named with labelled data: it was chosen on the measured rows. It is better than "
            f"the vote on {better} of {len(alone.tasks)} tasks and worse on {worse}."
        )
    mass = f"the vote of {voters}"
    return Verdict("routing accuracy, mean over the tasks", best if alone.mean >= together.mean else mass,
                   max(alone.mean, together.mean), mass, together.mean, max(alone.margin, together.margin), why)  # fmt: skip


def _sentences(voters: list[Voter], found: dict[str, Measured], together: Measured) -> list[str]:
    sentences = []
    for letter, words in _WORDS.items():
        own = [v.name for v in voters if v.site.name[0] == letter and v.name in found]
        if own:
            mean = sum(found[name].mean for name in own) / len(own)
            top = max(own, key=lambda name: found[name].mean)
            sentences.append(
                f"Sites {letter} ({words}): {percent(mean)} on average; the best is {top} with {percent(found[top].mean)}."
            )
    everywhere = [
        name for name, one in found.items()
        if all(share >= max(other.tasks[task] for other in found.values()) for task, share in one.tasks.items())
    ]  # fmt: skip
    sentences.append(
        f"{everywhere[0]} is the best site of every task." if everywhere else "No site is the best of every task."
    )
    return sentences


def _table(context: StudyContext, voters: list[Voter], found: dict[str, Measured], together: Measured) -> Table:
    rows = [[v.name, *_cells(context, found[v.name])] for v in voters]
    return Table(["site", "mean", "±", *context.measured], [*rows, [VOTE, *_cells(context, together)]], total=True)


def _cells(context: StudyContext, found: Measured) -> list[str]:
    deviation = "-" if found.deviation is None else f"{100 * found.deviation:.1f}"
    return [percent(found.mean), deviation, *(percent(found.tasks[task]) for task in context.measured)]


def _pictures(
    context: StudyContext, voters: list[Voter], found: dict[str, Measured], together: Measured
) -> list[Picture]:
    named = [v for v in voters if re.fullmatch(r"[AOMD]\d+", v.site.name)]
    tokens: list[str] = list(dict.fromkeys(v.token for v in named))
    sites = list(dict.fromkeys(v.site.name for v in named))
    overall = {t: {v.site.name: found[v.name].mean for v in named if v.token == t} for t in tokens}
    caption = (
        "Routing accuracy at each site by itself, mean over the tasks; the line is the vote of the bundle's voters."
    )
    pictures = [Picture("layers", caption, plots.site_bars(sites, overall, together.mean, VOTE))]
    best = max(tokens, key=lambda t: sum(overall[t].values()))
    per_task = {
        task: {v.site.name: found[v.name].tasks[task] for v in named if v.token == best} for task in context.measured
    }
    caption = f"Routing accuracy of each task at each site ({best} token), and by the vote."
    for letters in ("AOMD",) if len(sites) <= _WIDEST else ("AM", "OD"):
        own = [site for site in sites if site[0] in letters]
        grid = [[*(per_task[task][site] for site in own), together.tasks[task]] for task in context.measured]
        name = "layers-tasks" if len(own) == len(sites) else f"layers-tasks-{letters}"
        pictures.append(Picture(name, caption, plots.heat_map(context.measured, [*own, "vote"], grid)))
    return pictures


LAYERS = Study(
    "layers", "Routing accuracy at every site",
    "At which place of the network do the tasks' singular vectors tell inputs apart? Each site routes all inputs by itself, "
    "through the bundle's first pass and by its score; the vote is the bundle's own decision.",
    run, lambda context: context.seconds_for(2.5), here=PASSES,
)  # fmt: skip
