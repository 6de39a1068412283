"""Which sites and tokens of a bundle vote, and the router of what they see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from massmerge.bundle.layout import ROUTER
from massmerge.bundle.reader import Bundle
from massmerge.errors import InputError
from massmerge.io.tensor_file import TensorInfo, read_header, read_tensor
from massmerge.model.route.bases import SiteBases
from massmerge.model.route.first_pass import FirstPass, Token, Voter
from massmerge.model.route.references import empty_prompt_of, is_decoder, random_words
from massmerge.recipe import Recipe, RouterOptions
from massmerge.routing import Site, choose_sites
from massmerge.routing.neutral import NeutralRouter
from massmerge.routing.projection import ProjectionRouter, Score
from massmerge.routing.router import Router
from massmerge.routing.routers import find_router
from massmerge.routing.separation import own_starts, random_adapters, without_common, without_shared
from massmerge.routing.sites import IMAGE_KINDS
from massmerge.routing.typicality import Typicality

_TOKENS: dict[str, tuple[Token, ...]] = {
    "cls": ("cls",), "mean": ("mean",), "last": ("last",), "each": ("each",),
    "both": ("cls", "mean"), "mean_and_last": ("mean", "last"),
}  # fmt: skip
_ENOUGH = 4
"""Of fewer tasks half is two or one, and what one has is not shared."""
TYPICAL = "typical"
"""Stands before the names of what tells typical inputs from others, as a router's kind does before its own."""


def choose_voters(
    recipe: Recipe, sites: list[Site], base: PreTrainedModel, bases: SiteBases, *, half: bool
) -> list[Voter]:
    """Sites and tokens that vote.

    Image models have a class token, but in the early blocks it is nearly the same for every input: its residuals tell
    tasks apart, not inputs, and so favour one task for all. A decoder's last token has seen the whole prompt; of adapters
    that hardly left their random starts it tells more, and something else than the mean.
    """
    tasks = range(len(bases.tensors.names))

    def covered(site: Site) -> int:
        """How many tasks change what this site reads."""
        return sum(any(bases.tensors.changes(task, name) for name in site.tensors) for task in tasks)

    kinds = () if _reads_text(base) else IMAGE_KINDS
    chosen = choose_sites(sites, recipe.router.site, covered, half=half, kinds=kinds)
    random = _reads_text(base) and bool(_random_starts(chosen, bases, base))
    if recipe.router.site == "auto" and random:
        least = min(map(covered, chosen))
        chosen = [site for site in choose_sites(sites, "auto", kinds=("AOMD",)) if covered(site) >= least]
    token = recipe.router.token
    if token == "auto":
        token = "mean_and_last" if is_decoder(base) and random else "mean"
    return [Voter(site, t) for site in chosen for t in _TOKENS[token]]


def make_router(bundle: Bundle, kind: str, voters: list[Voter], subspaces: list[ProjectionRouter]) -> Router:
    """The router of a look: from the tasks' subspaces at its voters, or as `mass calibrate` fitted it."""
    if missing := not_fitted(bundle, kind, voters):
        raise InputError(
            f"{bundle.path}: the router {kind} has not been fitted for {', '.join(missing)}. "
            f"`mass calibrate {bundle.path} --inputs …` fits it."
        )
    return find_router(kind).load([voter.name for voter in voters], fitted_tensors(bundle, kind), subspaces)


def fitted_tensors(bundle: Bundle, kind: str) -> dict[str, Tensor]:
    """What `mass calibrate` has kept for a router."""
    return {name: read_tensor(info) for name, info in _fitted(bundle, kind).items()}


def load_typicality(bundle: Bundle, voters: list[Voter], subspaces: list[ProjectionRouter]) -> Typicality | None:
    """How typical an input is of the tasks, if `mass calibrate` has fitted that."""
    return Typicality.load([voter.name for voter in voters], fitted_tensors(bundle, TYPICAL), subspaces)


def not_fitted(bundle: Bundle, kind: str, voters: list[Voter]) -> list[str]:
    """Names of the voters that `mass calibrate` has fitted no router of this kind for."""
    return find_router(kind).missing([voter.name for voter in voters], _fitted(bundle, kind))


def _fitted(bundle: Bundle, kind: str) -> dict[str, TensorInfo]:
    """Where the tensors of a fitted router lie."""
    found = read_header(bundle.file(ROUTER)) if ROUTER in bundle.manifest["files"] else {}
    return {name.removeprefix(f"{kind}."): info for name, info in found.items() if name.startswith(f"{kind}.")}


def subspaces_of(
    voters: list[Voter],
    bases: SiteBases,
    options: RouterOptions,
    first_pass: FirstPass,
    processor: Path,
    *,
    second: bool = False,
) -> list[ProjectionRouter]:
    """The tasks' subspaces for each voter, which are the router that needs no data; tokens of one site share it.

    Adapters with random starts of their own are compared with what they hold of an input that belongs to no task.

    Args:
        voters: who votes.
        bases: the tasks' subspaces.
        options: how residuals are scored, and what they are compared with.
        first_pass: the pass that the voters look at.
        processor: the bundle's folder of the tokenizer, which empty prompts are made with.
        second: whether they are a second look's, which has to tell apart what looks alike.
    """
    sites = {voter.site.name: voter.site for voter in voters}
    random = _compared(options, [*sites.values()], bases, first_pass.model)
    if random:
        # A pass of its own, made when the first input is routed: whoever names the task of every input need not wait for it.
        neutral = cache(partial(_references, options, first_pass, processor))
        return [_neutral_router(bases, v.site, random, partial(_item, neutral, i)) for i, v in enumerate(voters)]
    made = {name: site_router(bases, site, options.score, second=second) for name, site in sites.items()}
    return [made[voter.site.name] for voter in voters]


def _compared(options: RouterOptions, sites: list[Site], bases: SiteBases, model: PreTrainedModel) -> list[int]:
    """The tasks that are compared with a reference; by default the adapters that look random."""
    if options.score != "residual" or options.reference == "none" or not _reads_text(model):
        return []
    if options.reference != "auto":
        return list(dict.fromkeys(bases.tensors.targets))
    return _random_starts(sites, bases, model)


def _references(options: RouterOptions, first_pass: FirstPass, processor: Path) -> list[Tensor]:
    """What each voter sees of inputs that belong to no task: of a decoder's empty prompt, or of random words."""
    wanted, model = options.reference, first_pass.model
    if wanted in ("template", "newline") or (wanted == "auto" and is_decoder(model)):
        empty = empty_prompt_of(model, processor, template=wanted != "newline")
        if empty is not None:
            return [z.pooled() for z in first_pass(empty)]
    return [z.pooled() for z in first_pass(random_words(model))]


def _item(make: Callable[[], list[Tensor]], place: int) -> Tensor:
    return make()[place]


def _neutral_router(bases: SiteBases, site: Site, random: list[int], neutral: Callable[[], Tensor]) -> NeutralRouter:
    """The router of a site where some adapters look random."""
    targets = bases.tensors.targets
    learned = [task for task, target in enumerate(targets) if target not in random]
    own = site_router(bases, site, tasks=learned) if len(learned) > 1 else None
    return NeutralRouter(bases.common([*range(len(targets))], site), neutral, learned, own)


def _reads_text(model: PreTrainedModel) -> bool:
    return model.main_input_name == "input_ids"


def _random_starts(sites: list[Site], bases: SiteBases, model: PreTrainedModel) -> list[int]:
    """Adapters that are compared with what they hold of no task; of one expert the first task.

    Those that look as if they had hardly left random starts of their own. Of a decoder all whose starts were their own: its
    prompts have so much in common, the template, that adapters which did leave their starts hold more or less of it too.
    """
    distinct = list(dict.fromkeys(bases.tensors.targets))
    forms = [bases.tensors.forms[task] for task in distinct]
    if "adapter" not in forms or len(distinct) < 2:
        return []
    found = bases.separation(sites)
    chosen = own_starts(found, forms) if is_decoder(model) else random_adapters(found, forms)
    return [distinct[i] for i in chosen]


def site_router(
    bases: SiteBases, site: Site, score: Score = "residual", tasks: Sequence[int] | None = None, *, second: bool = False
) -> ProjectionRouter:
    """The router that needs no data, from the singular vectors of all tasks at a site, or of some.

    A second look goes without what half of the tasks share: tasks that look alike lie in it alike.
    """
    targets = bases.tensors.targets
    chosen = [targets[task] for task in (range(len(targets)) if tasks is None else tasks)]
    distinct = list(dict.fromkeys(chosen))
    rows = bases.common(distinct, site)
    own = without_common(rows)
    alike = own is not rows
    if second and not alike and len(distinct) >= _ENOUGH:
        own = without_shared(rows)
    places = [distinct.index(target) for target in chosen]
    first = [places.index(place) for place in places]
    return ProjectionRouter([own[place] for place in places], score, alike=alike, targets=first)
