"""What a person should know of a merge whose tensors are finished: experts that are none, tasks that look alike."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from massmerge.bundle.merge_folder import MergeFolder
from massmerge.errors import Problem
from massmerge.io.tensor_file import read_tensor
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.routing.projection import site_basis
from massmerge.routing.separation import separation
from massmerge.routing.sites import Site, voting_sites


def findings(prepared: OpenedRecipe, work: MergeFolder) -> list[Problem]:
    """Warnings about a merge, from its parts."""
    found = [*_equal_experts(prepared, work), *_untrained_poolers(prepared)]
    if not prepared.recipe.merge.static and prepared.recipe.router.kind == "projection":
        found += _inseparable_tasks(prepared, work)
    return found


def _equal_experts(prepared: OpenedRecipe, work: MergeFolder) -> Iterator[Problem]:
    """Experts that change nothing, which most often is a mistake in the recipe."""
    parts = [work.header(i) for i in range(len(prepared.plan.tensors))]
    changed = sum((read_tensor(part["norm"]) for part in parts), start=torch.zeros(len(prepared.recipe.tasks)))
    for i, task in enumerate(prepared.recipe.tasks):
        if not changed[i] > 0:
            text = "is equal to the base: fine-tuning changed no tensor. Check which expert the recipe names."
            yield Problem(f"task {task.name} ({task.expert})", text, "warning")


def _untrained_poolers(prepared: OpenedRecipe) -> Iterator[Problem]:
    """Linear heads that would have read a pooler which their expert never trained."""
    for task in prepared.opened:
        read = prepared.heads[task.name].features
        features = "auto" if read is None else read()
        if features != "auto":
            text = (
                f"its `head:` has no `features:`, and fine-tuning left the base's pooler as it was, so the head reads "
                f"`features: {features}`. Set `features: pooled` if it was trained on the pooled output."
            )
            yield Problem(f"task {task.name} ({task.expert})", text, "warning")


def _inseparable_tasks(prepared: OpenedRecipe, work: MergeFolder) -> Iterator[Problem]:
    """Tasks whose subspaces the projection router cannot tell apart."""
    tasks = prepared.plan.tasks
    ranks = {tensor.name: tensor.ranks for tensor in prepared.plan.tensors}
    sites = voting_sites(prepared.base.skeleton.model, prepared.recipe.router.site, ranks, len(tasks))
    if len(tasks) < 2 or not sites:
        return
    places = {tensor.name: i for i, tensor in enumerate(prepared.plan.tensors)}
    found = separation([[_basis(work, places, site, task) for task in range(len(tasks))] for site in sites])
    names = [task.name for task in tasks]
    pairs = [(i, j) for i in range(len(tasks)) for j in range(i + 1, len(tasks)) if found.alike(i, j)]
    if pairs:
        shown = ", ".join(f"{names[i]} and {names[j]} ({found.overlap[i, j]:.0%})" for i, j in pairs[:5])
        more = f" and {len(pairs) - 5} other pairs" if len(pairs) > 5 else ""
        yield _warning(
            f"change the same directions, {shown}{more}, as adapters trained from the same initialisation do"
        )
    full = [i for i, task in enumerate(tasks) if task.form == "full"]
    if len(full) > 1 and all(found.random(i) for i in full):
        return  # experts with random weights, as examples and tests have them: nothing here was learned from inputs
    lost = [names[i] for i, task in enumerate(tasks) if task.form == "adapter" and found.random(i)]
    if lost:
        yield _warning(
            f"of {', '.join(lost)} change directions that look random, as adapters that hardly moved from their "
            "initialisation do"
        )


def _warning(what: str) -> Problem:
    return Problem(
        "router",
        f"updates {what}: the projection router may send inputs to the wrong task. Measure it with `mass eval`, or fit a "
        "router with a few unlabelled inputs of each task: `mass calibrate`.",
        "warning",
    )


def _basis(work: MergeFolder, places: dict[str, int], site: Site, task: int) -> Tensor:
    """A task's orthonormal rows at a site."""
    parts = [work.header(places[name]) for name in site.tensors if name in places]
    found = [(read_tensor(part[f"{task}.s"]), read_tensor(part[f"{task}.v"])) for part in parts if f"{task}.s" in part]
    return site_basis(found, max(len(s) for s, _ in found)) if found else torch.zeros(0, site.width)
