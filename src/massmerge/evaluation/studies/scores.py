"""Scores of many routers at many sites from one pass: what every study of routing is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from massmerge.answers import Routing
from massmerge.decision import Router
from massmerge.durable import drafted
from massmerge.evaluation.studies.context import StudyContext
from massmerge.evaluation.studies.settings import Sample
from massmerge.routing import Activation, FirstPass, Voter, margins, select, vote, weigh
from massmerge.routing.projection import ProjectionRouter
from massmerge.tensorfile import read_tensors, write_tensors

Scores = dict[str, dict[str, Tensor]]
"""For each router, for each voter's name, residuals (samples, T) in the order of the samples; less is better."""


def batches(context: StudyContext, samples: Sequence[Sample]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Samples of like size together, as (their places in the sequence, batch)."""
    order = sorted(range(len(samples)), key=lambda i: context.size(samples[i]))
    for start in range(0, len(order), context.settings.batch_size):
        chosen = order[start : start + context.settings.batch_size]
        yield chosen, context.runtime.batch([context.row(samples[i]) for i in chosen])


def gather(
    context: StudyContext,
    first_pass: FirstPass | Callable[[], FirstPass],
    routers: Mapping[str, Mapping[str, Router]],
    about: Mapping[str, Any],
    what: str = "first pass",
) -> Scores:
    """Scores of every router for every sample; tasks that an earlier run finished are read from the cache.

    Args:
        context: the study's.
        first_pass: gives the activations, run once for all routers; or what makes it, called only if it is needed.
        routers: by a name, for each of some voters' names a router.
        about: what tells these scores from others, as plain data: first pass, routers, voters.
        what: what the progress bar says.
    """
    folder = context.cache / "scores"
    found: list[dict[str, Tensor]] = []
    for task in context.measured:
        path = folder / f"{context.key('scores', {**about, 'task': task})[:24]}.safetensors"
        if not path.is_file():
            own = [sample for sample in context.samples if sample.task == task]
            began = time.perf_counter()
            first_pass = first_pass if isinstance(first_pass, FirstPass) else first_pass()
            made = _score(context, first_pass, routers, own, f"{what}, {task}")
            folder.mkdir(parents=True, exist_ok=True)
            with drafted(path) as draft:
                write_tensors(draft, made)
            context.cells.put(context.key("seconds", {**about, "task": task}), None, time.perf_counter() - began)
        found.append(dict(read_tensors(path)))
    return {
        name: {voter: torch.cat([one[f"{name}|{voter}"] for one in found]) for voter in per_voter}
        for name, per_voter in routers.items()
    }


@torch.inference_mode()
def _score(
    context: StudyContext,
    first_pass: FirstPass,
    routers: Mapping[str, Mapping[str, Router]],
    samples: Sequence[Sample],
    what: str,
) -> dict[str, Tensor]:
    size = context.settings.batch_size
    total = -(-len(samples) // size)
    places: list[int] = []
    parts: dict[str, list[Tensor]] = {}
    steps: Iterable[tuple[list[int], dict[str, Tensor]]] = context.progress(batches(context, samples), what, total)
    for chosen, batch in steps:
        places += chosen
        seen = dict(zip([v.name for v in first_pass.voters], first_pass(batch), strict=True))
        for name, per_voter in routers.items():
            for voter, router in per_voter.items():
                parts.setdefault(f"{name}|{voter}", []).append(scored(router, seen[voter]))
    back = torch.tensor(places).argsort()
    return {key: torch.cat(part)[back].contiguous() for key, part in parts.items()}


def scored(router: Router, seen: Activation) -> Tensor:
    """Residuals (batch, T) of what a voter sees: tokens one by one where the router is a projection, as in an answer."""
    activation = seen if isinstance(router, ProjectionRouter) else Activation(seen.pooled())
    return activation.averaged(router(activation.vectors))


def best_tasks(scores: Mapping[str, Tensor], voters: Sequence[Voter]) -> Tensor:
    """For each sample the task (n,) that these voters like best together."""
    return vote([scores[voter.name] for voter in voters]).argmin(1)


def shipped_residuals(context: StudyContext, scores: Mapping[str, Tensor]) -> Tensor:
    """Residuals (n, T) as the bundle decides: by its voters, and by those of the closer look where these are not sure.

    Args:
        context: the study's.
        scores: through the base, of every voter of either.
    """
    own = [scores[voter.name] for voter in context.runtime.voters]
    residuals, closer = vote(own).clone(), context.runtime.closer
    if closer is not None and len(context.tasks) > 1:
        everything = range(len(context.runtime.tasks))
        unsure = closer.needed(margins(own), residuals.argmin(1).tolist(), everything)
        residuals[unsure] = vote([scores[voter.name] for voter in closer.voters])[unsure]
    return residuals


def shipped_voters(context: StudyContext) -> list[Voter]:
    """Every voter that the bundle's decisions may ask."""
    closer = context.runtime.closer
    return list(dict.fromkeys([*context.runtime.voters, *(closer.voters if closer else ())]))


def weights_of(context: StudyContext, residuals: Tensor) -> Tensor:
    """The router's weights (n, T), as the bundle's recipe says."""
    options = context.runtime.recipe.router
    return weigh(residuals, standardized=options.standardize, temperature=options.temperature)


def routings_of(context: StudyContext, weights: Tensor, threshold: float, top_k: int) -> list[Routing]:
    """The routing of each sample by these weights (n, T)."""
    names = context.tasks
    return [
        Routing({}, dict(zip(names, row, strict=True)), [names[t] for t in chosen], "")
        for row, chosen in zip(weights.tolist(), select(weights, threshold, top_k), strict=True)
    ]
