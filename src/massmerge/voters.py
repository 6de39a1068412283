"""Which sites and tokens of a bundle vote, and the router of each voter."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from massmerge.bundle import ROUTER, Bundle
from massmerge.decision import Router
from massmerge.errors import InputError
from massmerge.recipe import Recipe
from massmerge.routing import Site, Voter, choose_sites
from massmerge.routing.mlp import MlpRouter
from massmerge.routing.nearest import NearestRouter
from massmerge.routing.projection import ProjectionRouter, Score, site_basis
from massmerge.routing.prototype import PrototypeRouter
from massmerge.routing.separation import without_common
from massmerge.task_tensors import TaskTensors
from massmerge.tensorfile import read_header, read_tensor


def choose_voters(
    recipe: Recipe, sites: list[Site], base: PreTrainedModel, tensors: TaskTensors, *, half: bool
) -> list[Voter]:
    """Sites and tokens that vote. A class token is there in most image models; in text it is one word among others."""
    tasks = range(len(tensors.names))

    def covered(site: Site) -> int:
        return sum(any(tensors.changes(task, name) for name in site.tensors) for task in tasks)

    chosen = choose_sites(sites, recipe.router.site, covered, half=half)
    token = recipe.router.token
    if token == "auto":
        names = {name.rpartition(".")[2] for name, _ in base.named_parameters()}
        token = "both" if names & {"cls_token", "class_embedding"} else "mean"
    return [Voter(site, t) for site in chosen for t in (("cls", "mean") if token == "both" else (token,))]


def make_routers(bundle: Bundle, kind: str, voters: list[Voter], tensors: TaskTensors) -> list[Router]:
    """The router of each voter: from the tasks' subspaces, or as `mass calibrate` fitted it."""
    if kind == "projection":
        made: dict[str, Router] = {}
        for voter in voters:
            if voter.site.name not in made:
                made[voter.site.name] = site_router(tensors, voter.site, bundle.recipe.router.score)
        return [made[voter.site.name] for voter in voters]
    if kind not in ("nearest", "prototype", "mlp"):
        raise InputError(f"no router {kind!r}. There are projection, nearest, prototype and mlp.")
    header = read_header(bundle.path / ROUTER) if (bundle.path / ROUTER).is_file() else {}
    fitted = {name: read_tensor(info) for name, info in header.items() if name.startswith(f"{kind}.")}
    missing = [v.name for v in voters if not any(name.startswith(f"{kind}.{v.name}.") for name in fitted)]
    if missing:
        raise InputError(
            f"{bundle.path}: the router {kind} has not been fitted for {', '.join(missing)}. "
            f"`mass calibrate {bundle.path} --inputs …` fits it."
        )
    return [fitted_router(kind, {n.removeprefix(f"{kind}.{v.name}."): t for n, t in fitted.items()}, len(tensors.names))
            for v in voters]  # fmt: skip


def site_router(tensors: TaskTensors, site: Site, score: Score = "residual") -> ProjectionRouter:
    """The router that needs no data, from the tasks' singular vectors at a site."""
    return ProjectionRouter(without_common([_basis(tensors, t, site) for t in range(len(tensors.names))]), score)


def fitted_router(kind: str, tensors: dict[str, Tensor], tasks: int) -> Router:
    """A router from the tensors that were fitted for one voter."""
    if kind == "prototype":
        return PrototypeRouter(tensors["weight"], tensors["offset"])
    if kind == "nearest":
        return NearestRouter(tensors["support"], tensors["owners"], tasks)
    return MlpRouter({n.removeprefix("net."): t for n, t in tensors.items() if n.startswith("net.")})


def _basis(tensors: TaskTensors, task: int, site: Site) -> Tensor:
    found = [f for name in site.tensors if (f := tensors.factors(task, name)) is not None]
    if not found:
        return torch.zeros(0, site.width)
    return site_basis([(f.s.cpu(), f.v.cpu()) for f in found], max(f.rank for f in found))
