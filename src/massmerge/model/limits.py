"""What inputs of known task say of confidence: the rule fitted again, and limits below which to answer "none of these"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from massmerge.model.answers import Routing
from massmerge.model.model import Model
from massmerge.routing.confidence import ConfidenceRule, least_confidence, log_odds, refit, sigmoid

GIVEN_UP = 0.05
"""The share of the tasks' own inputs that the limit of typicality gives up."""
_ASKED = 100  # inputs of a task that a limit of confidence is found with; each costs a second pass


@dataclass(frozen=True)
class Limits:
    """Limits that are proposed for `unknown:`.

    Attributes:
        typicality: the limit that gives up about a twentieth of the tasks' own inputs; none where it could not be found.
        confidence: the least limit with which answers are right in the wanted share; none if none was wanted or none
            reaches it.
        precision: the share that was wanted.
        answered: the share of the inputs that the limit of confidence leaves.
    """

    typicality: float | None = None
    confidence: float | None = None
    precision: float | None = None
    answered: float | None = None

    def unknown(self) -> dict[str, float]:
        """What a recipe says under `unknown:` with these limits."""
        found = {"confidence": self.confidence, "typicality": self.typicality}
        return {name: round(limit, 4) for name, limit in found.items() if limit is not None}

    def plain(self) -> dict[str, Any]:
        """The limits as plain data."""
        return asdict(self)


def fit_rule(start: ConfidenceRule, routings: Sequence[Routing], right: Sequence[bool]) -> ConfidenceRule:
    """The rule of confidence for a router.

    Args:
        start: the rule without data, which few inputs do not move far from.
        routings: of inputs that it was not fitted on, whose probabilities are plain evidence (`held_out_routings`).
        right: whether each found its task.
    """
    leads = torch.tensor([log_odds(routing.confidence or 0.0) for routing in routings])
    return refit(start, leads, torch.tensor(right))


def by_rule(routing: Routing, rule: ConfidenceRule) -> Routing:
    """A routing of plain evidence with the probabilities that a rule makes of it."""
    best, plain = routing.selected[0], routing.confidence or 0.0
    sure = sigmoid(rule.offset + rule.lead * log_odds(plain))
    rest = (1 - sure) / (1 - plain) if plain < 1 else 0.0
    found = {task: sure if task == best else p * rest for task, p in routing.probabilities.items()}
    return replace(routing, probabilities=found)


def typical_limit(left_out: Tensor, share: float = GIVEN_UP) -> float | None:
    """The limit that gives up a share of the tasks' own inputs, from the typicality of some that were left out (n,)."""
    return float(left_out.quantile(share)) if len(left_out) >= 1 / share else None


def confidence_limit(
    model: Model, items: Sequence[Any], routings: Sequence[Routing], owners: Sequence[int], precision: float
) -> tuple[float | None, float | None]:
    """The least confidence with which answers are right in a wanted share, and the share of inputs that it leaves.

    Labels are not known: an answer of the right task counts as right as its head is sure of it.

    Args:
        model: the bundle, whose heads are asked.
        items: the inputs; None where a drawn one stands in.
        routings: of each, with the probabilities of the rule in force.
        owners: the true task of each.
        precision: the wanted share.
    """
    seen = [0] * len(model.tasks)
    chosen = []
    for place, owner in enumerate(owners):
        seen[owner] += items[place] is not None
        if items[place] is not None and seen[owner] <= _ASKED:
            chosen.append(place)
    asked = [routings[place] for place in chosen]
    sure = [routing.confidence or 0.0 for routing in asked]
    labels = [1.0] * len(chosen)
    if not model.writes:
        answers = model.answer([items[place] for place in chosen], asked)
        labels = [(a.confidence or 0.0) / p if p else 0.0 for a, p in zip(answers, sure, strict=True)]
    confidences = [p * label for p, label in zip(sure, labels, strict=True)]
    right = [
        label if model.tasks[owners[place]] == routings[place].selected[0] else 0.0
        for place, label in zip(chosen, labels, strict=True)
    ]
    limit = least_confidence(confidences, right, precision)
    if limit is None:
        return None, None
    return limit, sum(one >= limit for one in confidences) / len(confidences)
