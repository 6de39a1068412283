"""Which sites and tokens of a bundle vote, and the router of what they see."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from massmerge.bundle.factors import TaskTensors
from massmerge.bundle.layout import ROUTER
from massmerge.bundle.reader import Bundle
from massmerge.errors import InputError
from massmerge.io.tensor_file import TensorInfo, read_header, read_tensor
from massmerge.model.route.first_pass import Voter
from massmerge.recipe import Recipe
from massmerge.routing import Site, choose_sites
from massmerge.routing.projection import ProjectionRouter, Score, of_common_rank, site_basis
from massmerge.routing.router import Router
from massmerge.routing.routers import find_router
from massmerge.routing.separation import without_common
from massmerge.routing.typicality import Typicality

TYPICAL = "typical"
"""Stands before the names of what tells typical inputs from others, as a router's kind does before its own."""


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


def make_router(bundle: Bundle, kind: str, voters: list[Voter], subspaces: list[ProjectionRouter]) -> Router:
    """The router of a look: from the tasks' subspaces at its voters, or as `mass calibrate` fitted it."""
    if missing := not_fitted(bundle, kind, voters):
        raise InputError(
            f"{bundle.path}: the router {kind} has not been fitted for {', '.join(missing)}. "
            f"`mass calibrate {bundle.path} --inputs …` fits it."
        )
    kept = {name: read_tensor(info) for name, info in _fitted(bundle, kind).items()}
    return find_router(kind).load([voter.name for voter in voters], kept, subspaces)


def load_typicality(bundle: Bundle, voters: list[Voter]) -> Typicality | None:
    """How typical an input is of the tasks, if `mass calibrate` has fitted that."""
    kept = {name: read_tensor(info) for name, info in _fitted(bundle, TYPICAL).items()}
    return Typicality.load([voter.name for voter in voters], kept)


def not_fitted(bundle: Bundle, kind: str, voters: list[Voter]) -> list[str]:
    """Names of the voters that `mass calibrate` has fitted no router of this kind for."""
    return find_router(kind).missing([voter.name for voter in voters], _fitted(bundle, kind))


def _fitted(bundle: Bundle, kind: str) -> dict[str, TensorInfo]:
    """Where the tensors of a fitted router lie."""
    found = read_header(bundle.file(ROUTER)) if ROUTER in bundle.manifest["files"] else {}
    return {name.removeprefix(f"{kind}."): info for name, info in found.items() if name.startswith(f"{kind}.")}


def subspaces_of(voters: list[Voter], tensors: TaskTensors, score: Score) -> list[ProjectionRouter]:
    """The tasks' subspaces for each voter, which are the router that needs no data; tokens of one site share it."""
    sites = {voter.site.name: voter.site for voter in voters}
    made = {name: site_router(tensors, site, score) for name, site in sites.items()}
    return [made[voter.site.name] for voter in voters]


def site_router(tensors: TaskTensors, site: Site, score: Score = "residual") -> ProjectionRouter:
    """The router that needs no data, from the tasks' singular vectors at a site."""
    targets = tensors.targets
    distinct = list(dict.fromkeys(targets))
    bases = of_common_rank([_basis(tensors, task, site) for task in distinct])
    own = without_common(bases)
    return ProjectionRouter([own[distinct.index(t)] for t in targets], score, alike=own is not bases, targets=targets)


def _basis(tensors: TaskTensors, task: int, site: Site) -> Tensor:
    found = [f for name in site.tensors if (f := tensors.factors(task, name)) is not None]
    if not found:
        return torch.zeros(0, site.width)
    return site_basis([(f.s.cpu(), f.v.cpu()) for f in found], max(f.rank for f in found))
