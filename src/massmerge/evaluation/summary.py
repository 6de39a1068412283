"""An evaluation in words, tables and plots: the same for the terminal and for the report."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from massmerge.evaluation import plots
from massmerge.evaluation.metrics import Figure
from massmerge.evaluation.predictions import write_predictions
from massmerge.evaluation.reliability import Reliability
from massmerge.evaluation.report import Heading, Items, Numbers, Part, Picture, Table, Text, write_report
from massmerge.evaluation.results import Evaluation
from massmerge.io.durable import write_text

_SHOWN_FAILURES = 20
_MUCH = 0.03  # of accuracy lost in routing that is worth a word
_ENOUGH = 0.98  # of the bundle's accuracy, which one pass must reach to be proposed
CALIBRATION_GAIN = (
    "`mass calibrate` fits a router on unlabelled inputs of each task: 400 per task raised the normalised accuracy of eight "
    "text tasks from 87.2 to 93.6 %."
)
METHOD = (
    "The rows of all tasks are shuffled into one stream that carries no task names. An answer is correct if task and "
    "label both are (strict), or when its label is declared to mean the same as the true one (shared). Rows that cannot be "
    "read and inputs that the model abstains from count as wrong. Micro-F1 counts all pairs of task and label. "
    "Normalised figures are divided by the expert's own. "
    "Intervals are of 95 %: Wilson's for accuracies and routing; for all means and ratios, F1 and Spearman the bootstrap "
    "over the rows of each task (1,000 draws, tasks and references of the suite taken as given). ± is the standard "
    "deviation over the tasks."
)


def percent(share: float | None) -> str:
    """A share as people read it."""
    return "-" if share is None else f"{100 * share:.1f} %"


def ends(figure: Figure | None) -> str:
    """The ends of an interval, in per cent."""
    return "-" if figure is None else f"{100 * figure.low:.1f} to {100 * figure.high:.1f}"


def metric_name(found: Evaluation) -> str:
    """What the figures are: the metric of the tasks, if they have one in common."""
    metrics = {task.metric for task in found.tasks}
    return metrics.pop() if len(metrics) == 1 else "figure"


def task_table(found: Evaluation) -> Table:
    """A row for each task, and the mean."""
    columns: list[tuple[str, Any]] = [
        ("task", lambda t: t.task),
        ("rows", lambda t: f"{t.rows:,}"),
        (metric_name(found), lambda t: percent(t.strict.value)),
        ("95 %", lambda t: ends(t.strict)),
    ]
    if metric_name(found) == "figure":
        columns.insert(2, ("metric", lambda t: t.metric))
    if found.shares_labels:
        columns.append(("shared", lambda t: percent(t.shared.value)))
    if found.routes:
        columns.append(("routing", lambda t: percent(t.routing.value)))
    if any(task.known for task in found.tasks):
        columns.append(("task given", lambda t: percent(t.known and t.known.value)))
    if any(task.once for task in found.tasks):
        columns.append(("one pass", lambda t: percent(t.once and t.once.value)))
    if any(task.reference is not None for task in found.tasks):
        columns.append(("expert", lambda t: percent(t.reference)))
        columns.append(("normalised", lambda t: percent(t.normalised and t.normalised.value)))
        if found.shares_labels:
            columns.append(("normalised, shared", lambda t: percent(t.normalised_shared and t.normalised_shared.value)))
    rows = [[str(cell(task)) for _, cell in columns] for task in found.tasks]
    return Table([name for name, _ in columns], rows)


def mean_table(found: Evaluation) -> Table:
    """Means over the tasks with their deviations and intervals."""
    metric = metric_name(found)
    words = {
        "strict": f"{metric}, strict" if found.shares_labels else metric,
        "shared": f"{metric}, shared labels" if found.shares_labels else "",
        "routing": "routing" if found.routes else "",
        "in_set": "own task in the selected set" if max(found.set_sizes, default=1) > 1 else "",
        "known": f"{metric} with the task given",
        "reference": f"{metric} of the experts",
        "normalised": f"normalised {metric}, strict" if found.shares_labels else f"normalised {metric}",
        "normalised_shared": f"normalised {metric}, shared labels" if found.shares_labels else "",
        "normalised_known": f"normalised {metric} with the task given",
        "once": f"{metric} with one pass",
        "once_known": f"{metric} with one pass and the task given",
        "normalised_once": f"normalised {metric} with one pass",
        "normalised_once_known": f"normalised {metric} with one pass and the task given",
    }
    rows = []
    for name, mean in found.means.items():
        if words[name]:
            deviation = "-" if mean.deviation is None else f"{100 * mean.deviation:.1f}"
            rows.append([words[name], percent(mean.value), deviation, ends(Figure(mean.value, mean.low, mean.high))])
    return Table(["mean over the tasks", "mean", "±", "95 %"], rows)


def routing_advice(found: Evaluation) -> str | None:
    """What to do where routing loses much; none where it does not, or where that was not measured."""
    if not found.routes or "known" not in found.means:
        return None
    cost = found.means["known"].value - found.means["strict"].value
    if cost < _MUCH:
        return None
    return f"routing costs {100 * cost:.1f} points. {CALIBRATION_GAIN} See docs/routing.md."


def second_pass_advice(found: Evaluation) -> str | None:
    """That the second pass gains little, where that is so; none where it was not measured."""
    if "once" not in found.means:
        return None
    once, twice = found.means["once"].value, found.means["strict"].value
    pairs = [(once, twice)]
    if "known" in found.means:  # where routing loses much, the second pass may matter and not show
        pairs.append((found.means["once_known"].value, found.means["known"].value))
    if any(one < _ENOUGH * two for one, two in pairs):
        return None
    reached = found.means.get("normalised_once")
    of = f"{percent(reached.value)} of the experts' {metric_name(found)}" if reached else percent(once)
    return (
        f"the base with these heads reaches {of} ({percent(once)}, with the second pass {percent(twice)}): you may not need "
        "the second pass. `mass predict --passes 1` leaves it out."
    )


def confusion_table(found: Evaluation) -> Table:
    """How many rows of each task were routed where; columns that nothing went to are left out."""
    counts = found.confusion.counts
    used = [
        i
        for i, name in enumerate(found.confusion.columns)
        if name in found.confusion.tasks or any(row[i] for row in counts)
    ]
    rows = [
        [task, *(f"{row[i]:,}" if row[i] else "" for i in used)]
        for task, row in zip(found.confusion.tasks, counts, strict=True)
    ]
    return Table(["routed to", *(found.confusion.columns[i] for i in used)], rows)


def mistakes(found: Evaluation, most: int = 10) -> list[str]:
    """The most frequent mistakes of routing, in words."""
    return [
        f"{task} → {where}: {count:,} ({percent(share)} of its rows)"
        for task, where, count, share in found.confusion.worst(most)
    ]


def facts(found: Evaluation) -> Iterator[tuple[str, str]]:
    """Set sizes, abstentions, failures, time and bytes: what each is, and the figure in words."""
    total = sum(task.rows for task in found.tasks)
    sizes = [
        f"{size} {'task' if size == 1 else 'tasks'}: {percent(n / total)}"
        for size, n in found.set_sizes.items()
        if size
    ]
    abstained, failed = sum(t.abstained for t in found.tasks), sum(t.failed for t in found.tasks)
    if found.reliability is not None:
        at = ", ".join(f"{name.replace('%', ' %')}: {percent(v)}" for name, v in found.reliability.accuracy_at.items())
        error = found.reliability.calibration_error
        yield "confidence", f"expected calibration error {error:.3f}; accuracy of the surest {at}"
    if found.routes:
        yield "selected sets", ", ".join(sizes) or "none"
        yield "abstained", f"{abstained:,} of {total:,} rows"
    yield "could not be read", f"{failed:,} of {total:,} rows, counted as wrong"
    steps = [f"{name} {ms:.1f} ms" for name, ms in found.timings.items() if name != "all"]
    if steps:
        everything = found.timings["all"]
        yield "time per input", ", ".join(steps) + f"; with reading and preparing it {everything:.1f} ms"
    if found.sizes is not None:
        sizes_of, kind = found.sizes, "merge" if "method" in found.options else "bundle"
        yield (
            "bytes",
            f"{kind} {sizes_of.bundle / 1e6:.1f} MB, {sizes_of.ratio:.2f} times the base ({sizes_of.base / 1e6:.1f} MB); "
            f"heads {sizes_of.heads / 1e6:.2f} MB more",
        )


def reliability_table(found: Reliability) -> Table:
    """Accuracy of the surest answers."""
    headers = ["surest answers", "accuracy", *(["normalised"] if found.normalised_at else [])]
    rows = [
        [
            name.replace("%", " %"),
            percent(value),
            *([percent(found.normalised_at[name])] if found.normalised_at else []),
        ]
        for name, value in found.accuracy_at.items()
    ]
    return Table(headers, rows)


def title_of(found: Evaluation) -> str:
    """What was measured, in one line."""
    rows = sum(task.rows for task in found.tasks)
    count = f"{len(found.tasks)} {'task' if len(found.tasks) == 1 else 'tasks'}"
    return f"{found.bundle} on {found.suite}, split {found.options['split']}: {count}, {rows:,} rows"


# The report


def write_evaluation(found: Evaluation, folder: Path) -> None:
    """Write `report.md`, `report.html`, `result.json`, plots, and every answer as `predictions.parquet` or `.csv`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "result.json", found.to_json() + "\n")
    write_predictions(found, folder)
    write_report(folder, f"{found.bundle} on {found.suite}", report_parts(found))


def report_parts(found: Evaluation) -> list[Part]:
    """The report of an evaluation."""
    means = found.means
    metric = metric_name(found)
    normalised = means.get("normalised")
    numbers = [(_with_deviation(found, "strict"), f"{metric}, mean over the tasks")]
    if normalised is not None:
        numbers.insert(0, (_with_deviation(found, "normalised"), f"normalised {metric}, mean over the tasks"))
    if found.routes:
        numbers.append((percent(means["routing"].value), "of inputs are routed to their own task"))
    if found.sizes is not None:
        numbers.append((f"{found.sizes.ratio:.2f} ×", "the bytes of the base, heads not counted"))
    parts: list[Part] = [
        Text(f"{title_of(found)}."),
        Numbers(numbers),
        Heading("Tasks"),
        task_table(found),
        mean_table(found),
    ]
    parts.append(Picture("radar", f"{metric.capitalize()} of each task.", _radar(found)))
    parts += _routing_parts(found) if found.routes else []
    residuals = residual_pairs(found)
    if residuals:
        caption = "Residuals of each task's rows: of their own task, and the lowest of all others."
        parts.append(Picture("residuals", caption, plots.residual_histograms(residuals)))
    parts += _confidence_parts(found.reliability) if found.reliability else []
    parts += [Heading("Costs and sets"), Items([f"{name}: {words}" for name, words in facts(found)])]
    if found.failures:
        shown = [f"`{name}`: {error}" for name, error in found.failures[:_SHOWN_FAILURES]]
        rest = len(found.failures) - len(shown)
        parts += [Heading("Rows that could not be read"), Items([*shown, *([f"… and {rest} more"] if rest else [])])]
    parts += [Heading("How it was measured"), Text(METHOD)]
    options = [
        f"{name.replace('_', ' ')}: {_words(value)}" for name, value in found.options.items() if value is not None
    ]
    advice = second_pass_advice(found)
    parts.append(Items([*found.notes, *([advice] if advice else []), *options, f"measured at {found.created}"]))
    return parts


def _routing_parts(found: Evaluation) -> list[Part]:
    wrong = mistakes(found)
    return [
        Heading("Routing"),
        Picture("confusion", "Where the rows of each task were routed.", plots.confusion(found.confusion)),
        Items(wrong) if wrong else Text("Every row was routed to its own task."),
    ]


def _confidence_parts(found: Reliability) -> list[Part]:
    words = (
        f"Expected calibration error: {found.calibration_error:.3f}, over {found.rows:,} answers in ten bins. "
        "0 means that of the answers with a confidence of 80 %, 80 % are correct. Each task counts alike."
    )
    caption = "Left: accuracy of answers by confidence. Right: accuracy if only the surest answers are given."
    return [
        Heading("Confidence"),
        Text(words),
        reliability_table(found),
        Picture("reliability", caption, plots.reliability(found)),
    ]


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(" = ".join(part) if isinstance(part, list) else str(part) for part in value) or "none"
    return str(value)


def _with_deviation(found: Evaluation, name: str) -> str:
    mean = found.means[name]
    deviation = "" if mean.deviation is None else f" ± {100 * mean.deviation:.1f}"
    return f"{100 * mean.value:.1f}{deviation} %"


def _radar(found: Evaluation) -> Any:
    """The bundle's figures beside those with the task given and those of the experts."""
    series = {"bundle": [max(0.0, task.strict.value) for task in found.tasks]}
    if "reference" in found.means:
        series["experts"] = [float(task.reference or 0.0) for task in found.tasks]
    if "known" in found.means:
        series["bundle, task given"] = [max(0.0, task.known.value) for task in found.tasks if task.known is not None]
    return plots.radar([task.task for task in found.tasks], series)


def residual_pairs(found: Evaluation) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """For each task the residuals of its rows: of the task itself, and the least of the others."""
    names = found.confusion.columns[:-2]
    residuals = {result.task: array("f") for result in found.tasks}
    for row in found.results:
        if len(row.residuals) > 1:
            residuals[row.task].extend(row.residuals)
    pairs = {}
    for task, numbers in residuals.items():
        if numbers:
            table, place = np.array(numbers).reshape(-1, len(names)), names.index(task)
            pairs[task] = (table[:, place].astype(float), np.delete(table, place, 1).min(1).astype(float))
    return pairs
