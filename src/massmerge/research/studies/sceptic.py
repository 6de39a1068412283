"""What a sceptic would ship instead: one model, the tasks' heads, and our router to choose among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from massmerge.evaluation.metrics import Given
from massmerge.model.answers import Prediction
from massmerge.model.model import Model
from massmerge.model.static import StaticModel
from massmerge.research.studies.compared import Answered, answers_of, one_pass_outcomes
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.statics import StaticMerge


def base_routed(context: StudyContext, nbytes: int) -> Answered:
    """The frozen base with the tasks' heads, chosen by our router: one pass.

    Args:
        context: the study's.
        nbytes: of the base.
    """
    return answers_of(
        context, "base, routed", {}, lambda: one_pass_outcomes(context.model, nbytes + router_bytes(context.model))
    )


def static_routed(context: StudyContext, method: str) -> Answered:
    """A static merge whose head is chosen by our router; its answers with the task given are the merge's own."""
    merge = StaticMerge(context, method)
    about = {"recipe": merge.recipe.dump(), "scale": merge.scale[0]}
    found = answers_of(context, f"{method}, routed", about, lambda: RoutedHeads(context.model, merge.ready()))
    merge.remove()
    return found


@dataclass(frozen=True)
class RoutedHeads:
    """A static merge that answers with the head of the task which a bundle's router finds."""

    router: Model
    static: StaticModel

    @property
    def nbytes(self) -> int:
        """Of the merge and of the subspaces that the router compares."""
        return self.static.nbytes + router_bytes(self.router)

    def outcomes(
        self, inputs: Sequence[Any], tasks: Sequence[str], *, batch_size: int = 32, **options: Any
    ) -> list[tuple[Prediction, Prediction]]:
        """The answer of the head that the router chooses; there is none with the task given, which is the merge's own."""
        routed = [r.selected[0] for r in self.router.route(list(inputs), batch_size=batch_size, unknown={})]
        found = self.static.outcomes(inputs, routed, batch_size=batch_size, **options)
        return [(answer, Prediction(None)) for _, answer in found]


def router_bytes(model: Model) -> int:
    """Bytes of what the router compares inputs with: the tasks' singular vectors at the voting sites."""
    stages, tensors = model.stages, model.sets.tensors
    looks = [stages.first, *([stages.second] if stages.second else [])]
    names = {name for look in looks for voter in look.voters for name in voter.site.tensors}
    found = (tensors.factors(t, name) for name in names for t in range(len(model.tasks)))
    return sum(factors.v.numel() * factors.v.element_size() for factors in found if factors is not None)


def standardised_choice(heads: Sequence[dict[str, tuple[str, float]]]) -> list[Given]:
    """For each input the label of the head whose best logit is the most unusual for that head.

    Heads that were trained apart have logits on scales of their own, so the largest one is most often the same head's. Their
    means and deviations over all inputs need no labels: the fairest choice that is known without a router.

    Args:
        heads: for each input the best label and its logit of each task's head.
    """
    tasks = list(heads[0])
    scales = {}
    for task in tasks:
        logits = [one[task][1] for one in heads]
        mean = sum(logits) / len(logits)
        deviation = (sum((logit - mean) ** 2 for logit in logits) / len(logits)) ** 0.5
        scales[task] = mean, deviation or 1.0
    found = []
    for one in heads:
        best = max(tasks, key=partial(_unusual, one, scales))
        found.append(Given(best, one[best][0]))
    return found


def _unusual(one: dict[str, tuple[str, float]], scales: dict[str, tuple[float, float]], task: str) -> float:
    mean, deviation = scales[task]
    return (one[task][1] - mean) / deviation
