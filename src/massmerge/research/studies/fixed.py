"""Fixed models of a bundle, for any redundancy filter, made from the factors that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from massmerge.bundle.reader import Bundle
from massmerge.checkpoints.skeleton import Skeleton
from massmerge.linalg.factors import Factors, accept_distinct, similarity, tsv_merge
from massmerge.model.route.bases import SiteBases
from massmerge.model.route.first_pass import FirstPass, Voter
from massmerge.model.route.fixed import put_fixed
from massmerge.model.route.voters import site_router
from massmerge.model.trees import shared_copy
from massmerge.recipe import Redundancy
from massmerge.research.studies.cells import checksum
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.scores import gather

Accepted = dict[str, list[int]]
"""For each matrix the tasks that the fixed model is made of."""


def factors_of(context: StudyContext, name: str) -> dict[int, Factors]:
    """The tasks' factors of a matrix, by position."""
    tensors = context.model.sets.tensors
    return {t: f for t in range(len(tensors.names)) if (f := tensors.factors(t, name)) is not None}


def matrices(context: StudyContext) -> list[str]:
    """Names of the matrices that have factors."""
    tensors = context.model.sets.tensors
    return sorted(n for n in tensors.touched() if any(tensors.changes(t, n) for t in range(len(tensors.names))))


def similarities(context: StudyContext, metric: str) -> dict[str, list[list[float]]]:
    """For each matrix how similar the deltas of its tasks are, in their order."""

    def compute() -> dict[str, list[list[float]]]:
        """The similarities of all matrices."""
        names = matrices(context)
        return {
            name: similarity(list(factors_of(context, name).values()), metric).tolist()
            for name in context.progress(names, f"similarity by {metric}", len(names))
        }

    found: dict[str, list[list[float]]] = context.cell("similarity", {"metric": metric}, compute)
    return found


def accepted_tasks(context: StudyContext, redundancy: Redundancy | str) -> Accepted:
    """Which tasks the filter leaves in the fixed model, matrix by matrix; all with `none`."""
    if isinstance(redundancy, str):
        return {name: list(factors_of(context, name)) for name in matrices(context)}
    accepted: Accepted = {}
    for name, found in similarities(context, redundancy.metric).items():
        tasks = list(factors_of(context, name))
        chosen = accept_distinct(torch.tensor(found, dtype=torch.float64), redundancy.threshold)
        accepted[name] = [tasks[i] for i in chosen]
    return accepted


def own_accepted(context: StudyContext) -> Accepted | None:
    """Which tasks the bundle's own fixed model is made of; none if its first pass is the base's."""
    if context.model.stages.options.first_pass != "fixed":
        return None
    bundle = Bundle(context.bundle, check=False)
    accepted = bundle.statistics["accepted"].bool()
    return {
        name: [task for task in factors_of(context, name) if accepted[row, task]]
        for row, name in enumerate(bundle.ranks)
    }


def pass_scores(context: StudyContext, accepted: Accepted | None, voters: list[Voter]) -> dict[str, Tensor]:
    """Residuals (n, T) of each voter through a fixed model, or through the base, by the bundle's score.

    Equal fixed models are run once.
    """
    score = context.model.stages.options.score
    bases = SiteBases(context.model.sets.tensors)
    sites = {v.site: site_router(bases, v.site, score) for v in voters}
    routers = {"projection": {v.name: sites[v.site] for v in voters}}
    about = {"score": score, "voters": [v.name for v in voters]}
    if accepted is None:
        base = FirstPass(context.model.core.base, voters)
        return gather(context, base, routers, {**about, "first_pass": "base"})["projection"]
    about |= fixed_about(accepted)
    through = "through the fixed model"
    return gather(context, lambda: fixed_pass(context, accepted, voters), routers, about, through)["projection"]


def fixed_about(accepted: Accepted) -> dict[str, Any]:
    """What tells a fixed model from others: filters that leave out the same are the same."""
    return {"first_pass": "fixed", "accepted": checksum(accepted)}


def fixed_pass(context: StudyContext, accepted: Mapping[str, list[int]], voters: list[Voter]) -> FirstPass:
    """A first pass through the fixed model that is made of these tasks."""
    base = context.model.core.base
    tree = shared_copy(base)
    first_pass = FirstPass(tree, voters)

    def change(name: str) -> Tensor | None:
        """The merged delta of a matrix; none where all tasks are left out."""
        if name not in accepted:
            return None
        factors = factors_of(context, name)
        return tsv_merge([factors[task] for task in accepted[name]])

    put_fixed(context.model.sets.tensors, tree, first_pass, Skeleton(base).slots, change)
    return first_pass
