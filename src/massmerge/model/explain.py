"""Why an input was answered as it was: residual and weight of every task, the set, the heads, the time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from massmerge.errors import InputError
from massmerge.io.drawing import plain, pyplot
from massmerge.model.answers import Answer, Prediction
from massmerge.model.model import Model

_CHOSEN, _BEST, _OTHERS = "#2a6f97", "#e07a3f", "#c3ccd3"


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
    """Answer one input and keep everything that led to the answer; a bundle that writes has no heads to show."""
    if model.writes:
        text = model.generate([item], task=task)[0]
        return Explanation(
            Prediction(text.task, text.text, routing=text.routing, timings=text.timings, confidence=text.confidence), {}
        )
    prediction = model.predict([item], top=10_000, task=task)[0]
    return Explanation(prediction, heads_of(prediction, top))


def heads_of(prediction: Prediction, top: int) -> dict[str, list[Answer]]:
    """For each task of the selected set the best labels of its head; the prediction must hold all of them."""
    if prediction.task is None:
        return {}
    best = Answer(prediction.task, str(prediction.label), prediction.score, prediction.logit or 0.0, prediction.value)
    heads: dict[str, list[Answer]] = {}
    for answer in [*([best] if prediction.label is not None else []), *prediction.alternatives]:
        if len(heads.setdefault(answer.task, [])) < top:
            heads[answer.task].append(answer)
    return heads


def answer_in_words(prediction: Prediction) -> str:
    """Task, label and score, or all labels that pass, or the number; a text that was written has no score."""
    if prediction.task is None:
        return "unknown"
    pairs = [(prediction.label, prediction.score)]
    if prediction.labels is not None and prediction.scores is not None:
        pairs = list(zip(prediction.labels, prediction.scores, strict=True))
    if prediction.value is not None:
        pairs = [(f"{prediction.label} = {prediction.value:.3f}", None)]
    words = [f"{label}" if score is None else f"{label} ({score:.3f})" for label, score in pairs]
    return f"{prediction.task}: {', '.join(words) or 'no label'}"


def confidence_in_words(prediction: Prediction) -> str:
    """How sure the answer is, and what that consists of."""
    words = f"confidence: {prediction.confidence:.0%}"
    task = prediction.routing.confidence if prediction.routing else None
    if prediction.task is None or not task or prediction.confidence is None or not prediction.routing:
        return words
    if not prediction.routing.residuals:
        return f"{words} (the task was given)"
    return f"{words} (task {task:.0%}, label if the task is right {min(1.0, prediction.confidence / task):.0%})"


def plot_explanation(found: Explanation, title: str, path: str | Path) -> None:
    """Draw weights, residuals and the heads' best labels.

    Raises:
        InputError: the file's name does not say a format that can be drawn.
        MassError: matplotlib is missing.
    """
    plt = pyplot()
    routing = found.prediction.routing
    assert routing is not None
    names = sorted(routing.weights, key=lambda n: routing.weights[n])
    colours = [_CHOSEN if n in routing.selected else _OTHERS for n in names]
    answers = [a for head in found.heads.values() for a in head][::-1]
    best = found.prediction.labels or [str(found.prediction.label)]
    panels = [
        ("weight of each task", names, [routing.weights[n] for n in names], colours),
        ("residual of each task (less is better)", names, [routing.residuals.get(n, 0.0) for n in names], colours),
        ("probability of labels, head by head", [f"{a.task}: {a.label}" for a in answers],
         [a.logit if a.score is None else a.score for a in answers],
         [_BEST if a.task == found.prediction.task and a.label in best else _OTHERS for a in answers]),
    ]  # fmt: skip
    panels = [panel for panel in panels if panel[1] and (routing.residuals or "residual" not in panel[0])]
    rows = max(len(panel[1]) for panel in panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 1.5 + 0.36 * max(3, rows)), squeeze=False)
    for axis, (name, ticks, values, shades) in zip(axes[0], panels, strict=True):
        _draw_bars(axis, name, ticks, values, shades)
        axis.set_ylim(len(ticks) - rows - 0.5, len(ticks) - 0.5)  # bars of one thickness in all panels
    given = title if len(title) < 90 else title[:87] + "…"
    words = f"{given}\n{answer_in_words(found.prediction)}"
    figure.suptitle(plain(words, len(words)), fontsize=11)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except ValueError:
        raise InputError(f"{path}: cannot be drawn. Name a file that ends in .png, .svg or .pdf.") from None
    finally:
        plt.close(figure)


def _draw_bars(axis: Any, name: str, ticks: list[str], values: list[float], colours: list[str]) -> None:
    """Bars with their values beside them, the best on top."""
    places = range(len(values))
    bars = axis.barh(places, values, color=colours, height=0.7)
    axis.set_yticks(places, [plain(tick, 28) for tick in ticks], fontsize=9)
    axis.bar_label(bars, fmt="%.3f", padding=3, fontsize=8, color="#44505a")
    axis.margins(x=0.3)  # room for the values, on the left too where a bar goes there
    axis.axvline(0, color="#8a949c", linewidth=0.8)
    axis.set_title(name, fontsize=10, loc="left", color="#44505a")
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.set_xticks([])
