"""How sure an answer is: the probability that its task is right, that its label is, and that both are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from massmerge.routing.selection import standardize

_SHARPNESS = 4.0  # makes strengths of standardised scores, so that a clear answer's log-odds are of the order of 5
_SURE = 12.0  # log-odds beyond which nothing is surer
_PRIOR = 4.0  # what the constants of a fit are held to those it starts from by: about so many inputs
_STEPS = 50


@dataclass(frozen=True)
class ConfidenceRule:
    """Constants of the rule; `python -m benchmarks.confidence fit BUNDLE SUITE` fits them.

    Attributes:
        offset: log-odds that the task is right where the evidence says nothing.
        lead: what the log-odds of the best task's standing among all tasks count.
        label_offset: log-odds that the label is right where the head finds it even, the task being right.
        label: what the log-odds of the head's probability count.
    """

    offset: float
    lead: float
    label_offset: float
    label: float

    @classmethod
    def of(cls, constants: Mapping[str, float]) -> ConfidenceRule:
        """The rule of constants by name; what is missing is that of texts."""
        return replace(TEXTS, **{name: float(value) for name, value in constants.items() if name in _NAMES})

    def of_probabilities(self) -> ConfidenceRule:
        """The same for a router that gives probabilities itself."""
        return replace(self, offset=0.0, lead=1.0)


_NAMES = {field.name for field in fields(ConfidenceRule)}
TEXTS = ConfidenceRule(offset=0.0, lead=0.9, label_offset=0.06, label=0.56)
"""Without data: fitted on validation rows of the text suite's core tasks."""
IMAGES = ConfidenceRule(offset=0.74, lead=1.39, label_offset=0.18, label=1.11)
"""Without data: fitted on validation rows of image tasks that are not among the core tasks, of which it is reported."""


def data_free_rule(*, images: bool) -> ConfidenceRule:
    """The rule for scores that say no more than which task is better, before any input has been seen."""
    return IMAGES if images else TEXTS


def strengths(scores: list[Tensor], *, probable: bool = False) -> Tensor:
    """How strongly the evidence speaks for each task (n, T), as logarithms up to what is the same for all tasks.

    Args:
        scores: of each voter (n, T), less is better.
        probable: whether there is one opinion, a negative log-probability.
    """
    return -scores[0] if probable else -_SHARPNESS * standardize(torch.stack(scores)).mean(0)


def lead_log_odds(strong: Sequence[float], chosen: int) -> float:
    """How clearly a task stands out: the log-odds of its part in a softmax over all tasks.

    Two tasks and twenty are alike in it, for each rival adds its own part: a lead over many is worth less than over one.

    Args:
        strong: for each task how strongly the evidence speaks for it (`strengths`).
        chosen: the task.
    """
    rivals = [value for task, value in enumerate(strong) if task != chosen]
    if not rivals:
        return _SURE
    most = max(rivals)
    total = most + math.log(sum(math.exp(value - most) for value in rivals))
    return _bounded(strong[chosen] - total)


def task_probabilities(strong: Sequence[float], best: int, rule: ConfidenceRule) -> list[float]:
    """For each task the probability that it is the right one; they add up to 1.

    Args:
        strong: as in `lead_log_odds`.
        best: the task that the vote prefers. The others share what it leaves.
        rule: the constants.
    """
    if len(strong) == 1:
        return [1.0]
    sure = sigmoid(rule.offset + rule.lead * lead_log_odds(strong, best))
    most = max(value for task, value in enumerate(strong) if task != best)
    parts = [0.0 if task == best else math.exp(value - most) for task, value in enumerate(strong)]
    total = sum(parts)
    return [sure if task == best else (1 - sure) * part / total for task, part in enumerate(parts)]


def head_evidence(confidence: float, rule: ConfidenceRule) -> float:
    """What a head's full certainty adds to the log-odds of its task, if it is worth so many standard deviations."""
    return rule.lead * _SHARPNESS * confidence


def label_confidence(probability: float, rule: ConfidenceRule) -> float:
    """The probability that a label is right if its task is, from what the head gives it."""
    return sigmoid(rule.label_offset + rule.label * log_odds(probability))


def fit_confidence(evidence: Tensor, right: Tensor, start: tuple[float, float] = (0.0, 1.0)) -> tuple[float, float]:
    """Offset and slope of the log-odds that an answer is right, by logistic regression.

    Args:
        evidence: `lead_log_odds` of answers, or the log-odds of heads' probabilities (n,).
        right: whether each answer was right (n,).
        start: offset and slope that a few answers do not move far from.
    """
    x = torch.stack([torch.ones(len(evidence)), evidence.float()], 1).double()
    y, prior = right.double(), torch.tensor(start, dtype=torch.float64)
    # The prior is as wide as the evidence: an offset of 1, and a slope of 1 over the evidence's usual size.
    stiffness = torch.diag(torch.stack([torch.ones(()), x[:, 1].square().mean().clamp_min(1e-6)]).double()) * _PRIOR / 4
    found = prior.clone()
    for _ in range(_STEPS):
        p = torch.sigmoid(x @ found)
        slope = x.mT @ (y - p) - stiffness @ (found - prior)
        curvature = (x * (p * (1 - p))[:, None]).mT @ x + stiffness
        step = torch.linalg.solve(curvature, slope)
        found = found + step.clamp(-1.0, 1.0)
        if float(step.abs().max()) < 1e-9:
            break
    return float(found[0]), max(0.0, float(found[1]))


def refit(rule: ConfidenceRule, leads: Tensor, right: Tensor) -> ConfidenceRule:
    """The rule with what inputs of known task say of routing; labels are not known, so the heads' part stays.

    Args:
        rule: what few inputs do not move far from.
        leads: `lead_log_odds` of inputs that the router was not fitted on (n,).
        right: whether the task was right (n,).
    """
    offset, lead = fit_confidence(leads, right, (rule.offset, rule.lead))
    return replace(rule, offset=offset, lead=lead)


def least_confidence(confidences: Sequence[float], right: Sequence[float], precision: float) -> float | None:
    """The least limit such that answers from it on are right in the wanted share; none if no limit reaches it.

    Args:
        confidences: of some answers.
        right: whether each was right, or how probable that is.
        precision: the share of right ones among those that are given.
    """
    order = sorted(range(len(confidences)), key=lambda i: -confidences[i])
    found, hits = None, 0.0
    for count, i in enumerate(order, 1):
        hits += right[i]
        last = count == len(order) or confidences[order[count]] < confidences[i]
        if last and hits / count >= precision:
            found = confidences[i]
    return found


def sigmoid(value: float) -> float:
    """The probability of log-odds."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def log_odds(probability: float) -> float:
    """Log-odds of a probability, within what counts as sure."""
    if probability <= 0.0 or probability >= 1.0:
        return _SURE if probability >= 1.0 else -_SURE
    return _bounded(math.log(probability / (1 - probability)))


def _bounded(value: float) -> float:
    return max(-_SURE, min(_SURE, value))
