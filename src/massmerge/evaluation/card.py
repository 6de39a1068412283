"""Puts what an evaluation found into a bundle's model card: a section for people, metadata for the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from massmerge.bundle.card import replace_card
from massmerge.bundle.download import refuse_hub
from massmerge.bundle.layout import CARD
from massmerge.checkpoints.terms import front_matter, with_front_matter
from massmerge.errors import InputError
from massmerge.evaluation.report import Table
from massmerge.evaluation.results import Evaluation
from massmerge.evaluation.summary import mistakes, percent, task_table

_TITLE = "## Results"
_SHOWN_MISTAKES = 5
_METRICS = {"spearman": "spearmanr", "micro_f1": "f1"}  # by the names that the hub has for them


def refuse_card(bundle: object) -> None:
    """Raise an error if there is no card that results could be put into."""
    if not isinstance(bundle, str | Path):
        raise InputError("a loaded model has no card. Give the bundle's folder instead.")
    refuse_hub(bundle)
    if not (Path(bundle) / CARD).is_file():
        raise InputError(f"{bundle}: has no {CARD} to put the results in.")


def write_results(bundle: Path, found: Evaluation) -> None:
    """Put the results into the card, in the place of earlier ones; no other file of the bundle changes.

    Raises:
        MassError: another command is writing the bundle, or the disk is full.
    """
    data, text = front_matter((bundle / CARD).read_text(encoding="utf-8"))
    data["model-index"] = _model_index(bundle.resolve().name, str(data.get("pipeline_tag")), found)
    before, _, rest = text.partition(f"\n{_TITLE}\n")
    after = (
        re.search(r"^## ", rest, re.MULTILINE) if rest else re.search(r"^## (?=Limits|Origin)", before, re.MULTILINE)
    )
    if not rest and after:
        before, rest = before[: after.start()], before[after.start() :]
    elif rest:
        rest = rest[after.start() :] if after else ""
    parts = [before.rstrip("\n"), _section(found), rest.strip("\n")]
    replace_card(bundle, with_front_matter(data, "\n\n".join(part for part in parts if part) + "\n"))


def _section(found: Evaluation) -> str:
    """What was measured, for people."""
    rows = sum(task.rows for task in found.tasks)
    means = [
        f"Mean over the tasks: {percent(found.means['strict'].value)}"
        + (f"; {percent(found.means['routing'].value)} of the inputs found their task" if found.routes else "")
        + (f"; {percent(found.means['known'].value)} with the task given" if "known" in found.means else "")
        + "."
    ]
    confused = mistakes(found, _SHOWN_MISTAKES) if found.routes else []
    wrong = ["", "Tasks that are confused most often:", "", *(f"- {line}" for line in confused)] if confused else []
    lead = (
        f"{rows:,} rows of the split `{found.options['split']}` of {len(found.tasks)} tasks in one stream without task "
        "names. An answer is correct if task and label both are."
    )
    return "\n".join([_TITLE, "", lead, "", _markdown(task_table(found)), "", *means, *wrong])


def _markdown(table: Table) -> str:
    rows = [table.headers, ["---"] * len(table.headers), *table.rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def _model_index(name: str, kind: str, found: Evaluation) -> list[dict[str, Any]]:
    """The same for the hub, which shows it beside the card."""
    from huggingface_hub import EvalResult
    from huggingface_hub.repocard_data import eval_results_to_model_index

    results = []
    for task in found.tasks:
        place, bracket, _ = task.where.partition(" (")  # which a table or a folder has none of
        figures = {"": (_METRICS.get(task.metric, task.metric), task.strict.value)}
        if found.routes:
            figures[" of routing"] = ("accuracy", task.routing.value)
        for what, (metric, value) in figures.items():
            results.append(
                EvalResult(
                    task_type=kind,
                    dataset_type=place if bracket else task.task,
                    dataset_name=f"{task.task} ({Path(place).name})",
                    dataset_split=str(found.options["split"]),
                    metric_type=metric,
                    metric_value=round(value, 4),
                    metric_name=f"{metric}{what}, task not given",
                )
            )
    return eval_results_to_model_index(name, results)
