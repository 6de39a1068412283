"""Why an input was answered as it was: residual and weight of every task, the set, the heads, the time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from massmerge.answers import Answer, Prediction
from massmerge.errors import MassError
from massmerge.model import Model


@dataclass(frozen=True)
class Explanation:
    """One input, explained."""

    prediction: Prediction
    heads: dict[str, list[Answer]]
    """For each task of the selected set the best labels of its head."""

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data."""
        return asdict(self)


def explain(model: Model, item: Any, *, top: int = 3, task: str | list[str] | None = None) -> Explanation:
    """Answer one input and keep everything that led to the answer."""
    prediction = model.predict([item], top=10_000, task=task)[0]
    answers = []
    if prediction.task is not None:
        best = Answer(prediction.task, str(prediction.label), prediction.score or 0.0, prediction.logit or 0.0)
        answers = [best, *prediction.alternatives]
    heads: dict[str, list[Answer]] = {}
    for answer in answers:
        if len(heads.setdefault(answer.task, [])) < top:
            heads[answer.task].append(answer)
    return Explanation(prediction, heads)


def plot_explanation(found: Explanation, title: str, path: str | Path) -> None:
    """Draw weights, residuals and the heads' best labels.

    Raises:
        MassError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise MassError("plots need matplotlib: pip install 'massmerge[eval]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    routing = found.prediction.routing
    assert routing is not None
    names = sorted(routing.weights, key=lambda n: routing.weights[n])
    labels = [(f"{a.task}: {a.label}", a.score) for answers in found.heads.values() for a in answers][::-1]
    height = 1.6 + 0.34 * max(len(names), len(labels))
    figure, axes = plt.subplots(1, 3, figsize=(12.5, max(3.0, height)), layout="constrained")
    colours = ["#2a6f97" if n in routing.selected else "#c3ccd3" for n in names]
    bars = (("router's weight", [routing.weights[n] for n in names]),
            ("residual (less is better)", [routing.residuals.get(n, 0.0) for n in names]))  # fmt: skip
    for axis, (name, values) in zip(axes, bars, strict=False):
        axis.barh(names, values, color=colours)
        axis.set_title(name)
    axes[2].barh([n for n, _ in labels], [v for _, v in labels], color="#e07a3f")
    axes[2].set_title("labels of the selected heads")
    axes[2].set_xlim(0, max(1.0, *(v for _, v in labels)) if labels else 1)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", alpha=0.3)
    figure.suptitle(title if len(title) < 110 else title[:107] + "…")
    figure.savefig(path, dpi=150)
    plt.close(figure)
