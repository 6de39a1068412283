"""Inputs that routing leaves unclear: several tasks answer, and how sure their heads are counts in the decision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from massmerge.model.answers import Prediction, Routing

_FULL = 10.0  # log-odds of a head that counts as certain: 0.99995


def spread(routings: Sequence[Routing], unsure: float, count: int) -> list[tuple[int, Routing]]:
    """Each input with its routing; an unclear one once for each of its candidates, which is selected there alone.

    Args:
        routings: of each input.
        unsure: an input whose best task leads by less is unclear.
        count: how many candidates it has.
    """
    found = []
    for i, routing in enumerate(routings):
        if len(routing.selected) != 1 or routing.margin is None or routing.margin >= unsure:
            found.append((i, routing))
            continue
        best = sorted(routing.residuals, key=routing.residuals.__getitem__)[:count]
        found += [(i, replace(routing, selected=[task])) for task in best]
    return found


def settle(asked: Iterable[tuple[int, Prediction]], confidence: float, evidence: float = 0.0) -> list[Prediction]:
    """The prediction of each input: of several candidates the one that vote and head together speak for.

    Args:
        asked: the number of an input and a prediction, all of one input one after the other.
        confidence: how many standard deviations of the vote a head's full certainty is worth.
        evidence: the same in log-odds of its task.
    """
    found: dict[int, list[Prediction]] = {}
    for i, prediction in asked:
        found.setdefault(i, []).append(prediction)
    return [several[0] if len(several) == 1 else _settled(several, confidence, evidence) for several in found.values()]


def certainty(probability: float) -> float:
    """How sure a head is, from −1 to 1, by the log-odds of its best label: they tell 0.99 from 0.9999."""
    kept = min(max(probability, 1e-9), 1 - 1e-9)
    return max(-1.0, min(1.0, math.log(kept / (1 - kept)) / _FULL))


def _settled(several: list[Prediction], confidence: float, evidence: float) -> Prediction:
    answered = [one for one in several if one.error is None]
    if not answered:
        return several[0]
    # A number, and a multi-label head of which no label passes, say nothing of how sure the head is.
    sure = {str(one.task): one.score or 0.0 for one in answered}

    def rank(one: Prediction) -> float:
        """Least for the candidate that answers."""
        assert one.routing is not None
        task, voters = str(one.task), len(one.routing.site.split())
        return one.routing.residuals[task] / voters - confidence * (certainty(sure[task]) if sure[task] else 0.0)

    best = min(answered, key=rank)
    assert best.routing is not None
    before = best.routing.probabilities
    parts = {
        task: p * math.exp(evidence * certainty(sure[task]) if sure.get(task) else 0.0) for task, p in before.items()
    }
    after = {task: part / sum(parts.values()) for task, part in parts.items()}
    routing = replace(best.routing, confidences=sure, probabilities=after)
    if best.confidence is None or not after:
        return replace(best, routing=routing)
    task = str(best.task)
    return replace(best, routing=routing, confidence=best.confidence / max(before[task], 1e-12) * after[task])
