"""Scores of many routers at many sites from one pass: what every study of routing is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from massmerge.io.durable import drafted
from massmerge.io.tensor_file import read_tensors, write_tensors
from massmerge.model.route.first_pass import FirstPass, Voter
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.settings import Sample
from massmerge.routing import Activation, vote
from massmerge.routing.per_voter import VoterRouter

Scores = dict[str, dict[str, Tensor]]
"""For each router, for each voter's name, residuals (samples, T) in the order of the samples; less is better."""
Measure = Callable[[list[Activation]], dict[str, Tensor]]
"""From what each voter sees of a batch to tensors with a row for each input."""


def batches(context: StudyContext, samples: Sequence[Sample]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Samples of like size together, as (their places in the sequence, batch)."""
    order = sorted(range(len(samples)), key=lambda i: context.size(samples[i]))
    for start in range(0, len(order), context.settings.batch_size):
        chosen = order[start : start + context.settings.batch_size]
        yield chosen, context.model.core.batch([context.row(samples[i]) for i in chosen])


def gather(
    context: StudyContext,
    first_pass: FirstPass | Callable[[], FirstPass],
    routers: Mapping[str, Mapping[str, VoterRouter]],
    about: Mapping[str, Any],
    what: str = "first pass",
) -> Scores:
    """Scores of every router for every sample.

    Args:
        context: the study's.
        first_pass: gives the activations, run once for all routers; or what makes it, called only if it is needed.
        routers: by a name, for each of some voters' names a router.
        about: what tells these scores from others, as plain data: first pass, routers, voters.
        what: what the progress bar says.
    """
    made = [first_pass] if isinstance(first_pass, FirstPass) else []

    def opened() -> FirstPass:
        """The first pass, opened when it is first needed."""
        if not made:
            assert not isinstance(first_pass, FirstPass)
            made.append(first_pass())
        return made[0]

    def measure(seen: list[Activation]) -> dict[str, Tensor]:
        """Each router's scores by the activations of each voter."""
        by_name = dict(zip([voter.name for voter in opened().voters], seen, strict=True))
        return {
            f"{name}|{voter}": scored(router, by_name[voter])
            for name, per_voter in routers.items()
            for voter, router in per_voter.items()
        }

    found = measured(context, opened, measure, about, what)
    return {name: {voter: found[f"{name}|{voter}"] for voter in per_voter} for name, per_voter in routers.items()}


def measured(
    context: StudyContext, first_pass: Callable[[], FirstPass], measure: Measure, about: Mapping[str, Any], what: str
) -> dict[str, Tensor]:
    """What a pass of every sample gives, in their order; tasks that an earlier run finished are read from the cache.

    Args:
        context: the study's.
        first_pass: gives the pass; called only if it is needed.
        measure: what is kept of it.
        about: what tells this from other measurements, as plain data.
        what: what the progress bar says.
    """
    folder = context.cache / "scores"
    found: list[dict[str, Tensor]] = []
    for task in context.measured:
        path = folder / f"{context.key('scores', {**about, 'task': task})[:24]}.safetensors"
        if not path.is_file():
            own = [sample for sample in context.samples if sample.task == task]
            began = time.perf_counter()
            made = _score(context, first_pass(), measure, own, f"{what}, {task}")
            folder.mkdir(parents=True, exist_ok=True)
            with drafted(path) as draft:
                write_tensors(draft, made)
            context.cells.put(context.key("seconds", {**about, "task": task}), None, time.perf_counter() - began)
        found.append(dict(read_tensors(path)))
    return {name: torch.cat([one[name] for one in found]) for name in found[0]}


@torch.inference_mode()
def _score(
    context: StudyContext, first_pass: FirstPass, measure: Measure, samples: Sequence[Sample], what: str
) -> dict[str, Tensor]:
    size = context.settings.batch_size
    total = -(-len(samples) // size)
    places: list[int] = []
    parts: dict[str, list[Tensor]] = {}
    steps: Iterable[tuple[list[int], dict[str, Tensor]]] = context.progress(batches(context, samples), what, total)
    for chosen, batch in steps:
        places += chosen
        for name, values in measure(first_pass(batch)).items():
            parts.setdefault(name, []).append(values)
    back = torch.tensor(places).argsort()
    return {key: torch.cat(part)[back].contiguous() for key, part in parts.items()}


def scored(router: VoterRouter, seen: Activation) -> Tensor:
    """Residuals (batch, T) of what a voter sees: tokens one by one where the router takes them so, as in an answer."""
    activation = seen if router.each_token else Activation(seen.pooled())
    return activation.averaged(router(activation.vectors))


def best_tasks(scores: Mapping[str, Tensor], voters: Sequence[Voter]) -> Tensor:
    """For each sample the task (n,) that these voters like best together."""
    return vote([scores[voter.name] for voter in voters]).argmin(1)
