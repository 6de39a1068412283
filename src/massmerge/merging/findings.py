"""What a person should know of a merge whose tensors are finished: experts that are none, tasks that look alike."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from massmerge.bundle.parts import Parts, tensor_key
from massmerge.errors import Problem
from massmerge.io.tensor_file import read_tensor
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.routing.projection import of_common_rank, site_basis
from massmerge.routing.separation import Separation, delta_cosines, random_adapters, routing_targets, separation
from massmerge.routing.sites import Site, voting_sites


def findings(prepared: OpenedRecipe, parts: Parts) -> list[Problem]:
    """Warnings about a merge, from its parts."""
    found = [*_equal_experts(prepared, parts), *_untrained_poolers(prepared)]
    if not prepared.recipe.merge.static and prepared.recipe.router.kind == "projection":
        found += _inseparable_tasks(prepared, parts)
    return found


def _equal_experts(prepared: OpenedRecipe, parts: Parts) -> Iterator[Problem]:
    """Experts that change nothing, which most often is a mistake in the recipe."""
    headers = [parts.header(tensor_key(i)) for i in range(len(prepared.plan.tensors))]
    changed = sum((read_tensor(header["norm"]) for header in headers), start=torch.zeros(len(prepared.recipe.tasks)))
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


def _inseparable_tasks(prepared: OpenedRecipe, parts: Parts) -> Iterator[Problem]:
    """Tasks whose subspaces the projection router cannot tell apart, and why."""
    tasks = prepared.plan.tasks
    ranks = {tensor.name: tensor.ranks for tensor in prepared.plan.tensors}
    sites = voting_sites(prepared.base.skeleton.model, prepared.recipe.router.site, ranks, len(tasks))
    if len(tasks) < 2 or not sites:
        return
    targets = _targets(prepared, parts)
    yield from _shared_experts([task.name for task in tasks], targets)
    distinct = list(dict.fromkeys(targets))
    places = {tensor.name: i for i, tensor in enumerate(prepared.plan.tensors)}
    forms = [tasks[i].form for i in distinct]
    bases = [
        of_common_rank(
            [_basis(parts, places, site, task) for task in distinct], prepared.recipe.routing_rank(site.width, forms)
        )
        for site in sites
    ]
    yield from _poor_subspaces([tasks[i].name for i in distinct], forms, separation(bases))


def _targets(prepared: OpenedRecipe, parts: Parts) -> list[int]:
    """For each task the first one with the same expert."""
    headers = [
        parts.header(tensor_key(i)) for i, tensor in enumerate(prepared.plan.tensors) if tensor.matrix is not None
    ]
    if not headers:
        return list(range(len(prepared.plan.tasks)))
    rows = [[read_tensor(header[name]) for header in headers] for name in ("cosine", "norm", "energy")]
    return routing_targets(delta_cosines(*map(torch.stack, rows)))


def _shared_experts(names: list[str], targets: list[int]) -> Iterator[Problem]:
    """Tasks that have one expert between them."""
    for first in dict.fromkeys(targets):
        shared = [name for name, target in zip(names, targets, strict=True) if target == first]
        if len(shared) > 1:
            yield Problem(
                "router",
                f"{', '.join(shared)} have the same expert, so the projection router sees one task: inputs of any of them "
                f"are answered by {shared[0]}, the first in the recipe. If their inputs differ, fit a router with a few of "
                "each: `mass calibrate`.",
                "warning",
            )


def _poor_subspaces(names: list[str], forms: list[str], found: Separation) -> Iterator[Problem]:
    """Different experts whose subspaces say little about their inputs."""
    count = len(names)
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count) if found.alike(i, j)]
    if pairs:
        shown = ", ".join(f"{names[i]} and {names[j]} ({found.overlap[i, j]:.0%})" for i, j in pairs[:5])
        more = f" and {len(pairs) - 5} other pairs" if len(pairs) > 5 else ""
        adapters = all(forms[i] == "adapter" for pair in pairs for i in pair)
        cause = "adapters trained from one random start" if adapters else "experts trained on similar inputs"
        yield _warning(f"updates change the same directions, {shown}{more}, as those of {cause} do")
    lost = [names[i] for i in random_adapters(found, forms)]
    if lost:
        beside = " Full fine-tunes beside them take many of their inputs." if "full" in forms else ""
        yield _warning(
            f"updates of {', '.join(lost)} change directions that look random, as those of adapters with random starts of "
            "their own do",
            beside,
        )


def _warning(what: str, more: str = "") -> Problem:
    return Problem(
        "router",
        f"{what}: the projection router may send inputs to the wrong task.{more} Measure it with `mass eval`, or fit a "
        "router with a few unlabelled inputs of each task: `mass calibrate`, or `inputs:` in the recipe.",
        "warning",
    )


def _basis(parts: Parts, places: dict[str, int], site: Site, task: int) -> Tensor:
    """A task's orthonormal rows at a site."""
    headers = [parts.header(tensor_key(places[name])) for name in site.tensors if name in places]
    own = [header for header in headers if f"{task}.s" in header]
    found = [(read_tensor(header[f"{task}.s"]), read_tensor(header[f"{task}.v"])) for header in own]
    return site_basis(found, max(len(s) for s, _ in found)) if found else torch.zeros(0, site.width)
