"""`mass eval`: how good a bundle or a static merge is, on a suite of labelled data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from massmerge.cli.by_engine import workers_option
from massmerge.cli.common import (
    bars,
    batch_size_option,
    cache_option,
    engine_option,
    placement_options,
    plural,
    print_json,
    table,
    verb,
)
from massmerge.errors import InputError
from massmerge.evaluation.evaluate import evaluate
from massmerge.evaluation.prepared import PreparedEvaluation, prepare_evaluation
from massmerge.evaluation.report import Table
from massmerge.evaluation.results import Evaluation
from massmerge.evaluation.suite import label_set
from massmerge.evaluation.summary import (
    confusion_table,
    facts,
    mean_table,
    mistakes,
    routing_advice,
    second_pass_advice,
    task_table,
    title_of,
)
from massmerge.recipe import Unknown

_WIDEST_MATRIX = 12  # tasks; a wider one has no place in a terminal
_SHOWN_FAILURES = 5


@click.command("eval")
@click.argument("bundle", type=click.Path(file_okay=False))
@click.argument("suite", type=click.Path(dir_okay=False))
@click.option("--task", "tasks", multiple=True, help="Measure these tasks of the suite only. May be repeated.")
@click.option("--split", help="What {split} stands for in the suite's paths, such as validation.  [default: test]")
@click.option("--limit", type=click.IntRange(min=1), help="At most this many rows per task, drawn at random.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="For the draw of rows, the order of the stream and the bootstrap.")  # fmt: skip
@click.option("--router", help="Use another router than the bundle's: projection, or one fitted by `mass calibrate`.")
@click.option("--route", type=click.Choice(["input", "batch"]), default="input", show_default=True,
              help="Decide per input, or once per batch; each batch then holds inputs of one task.")  # fmt: skip
@batch_size_option
@click.option("--unknown", multiple=True, metavar="KIND=LIMIT",
              help="When to abstain, instead of the recipe's limits, such as lift=1.1. May be repeated.")  # fmt: skip
@cache_option
@engine_option
@workers_option
@placement_options
@click.option("--oracle/--no-oracle", default=True, show_default=True,
              help="Also answer with the task given, to show what routing costs.")  # fmt: skip
@click.option(
    "--experts", is_flag=True, help="Measure each task's own expert, and the base with these heads, on the same rows."
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False),
    help="Where relative paths of the recipe start; the current folder by default.",
)
@click.option("--report", type=click.Path(file_okay=False), help="Write tables, plots and all answers to this folder.")
@click.option("--card", is_flag=True, help="Put the results into the model card of BUNDLE.")
@click.option("--dry-run", is_flag=True, help="Show what would be run, and run nothing.")
@verb
def eval_(
    bundle: str, suite: str, tasks: tuple[str, ...], split: str | None, limit: int | None, seed: int, router: str | None,
    route: Any, batch_size: int, unknown: tuple[str, ...], cache: str, engine: str | None, workers: int | None,
    device: str, dtype: str, oracle: bool, experts: bool, folder: str | None, report: str | None, card: bool,
    dry_run: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Measure BUNDLE, or a static merge, on the labelled data of SUITE.

    Inputs of all tasks are shuffled into one stream without task names; an answer is correct if task and label both are.
    """
    limits = _limits(unknown)
    if dry_run:
        ready = prepare_evaluation(bundle, suite, tasks=tasks, split=split, limit=limit, seed=seed)
        passes = _passes(ready, oracle=oracle, experts=experts)
        if as_json:
            print_json({**_plan(ready), "passes": passes})
        elif not quiet:
            click.echo(describe_plan(ready, passes))
        return
    found = evaluate(
        bundle, suite, tasks=tasks, split=split, limit=limit, seed=seed, router=router, route=route,
        batch_size=batch_size, unknown=limits, cache=cache, engine=engine, workers=workers, device=device, dtype=dtype,
        oracle=oracle, experts=experts, folder=folder, report=report, card=card, progress=bars(hidden=quiet or as_json),
    )  # fmt: skip
    if as_json:
        print_json(found.to_dict())
    elif not quiet:
        click.echo(describe(found))
        if report:
            click.echo(f"\nreport in {report}: report.html, report.md, result.json, every answer")
    _warn(found)


def _limits(given: tuple[str, ...]) -> dict[str, float] | None:
    """Limits of abstention as `predict` takes them; none leaves those of the recipe."""
    found: dict[str, float] = {}
    for entry in given:
        kind, equals, limit = entry.partition("=")
        try:
            found[kind] = float(limit)
        except ValueError:
            equals = ""
        if not equals or kind not in Unknown.model_fields:
            raise InputError(f"{entry!r}: write --unknown LIMIT=NUMBER; limits are {', '.join(Unknown.model_fields)}.")
    return found or None


def _warn(found: Evaluation) -> None:
    """Notes and failures, on standard error so that they are never taken for figures."""
    mark = click.style("note", fg="yellow", bold=True)
    for note in (*found.notes, *filter(None, [routing_advice(found), second_pass_advice(found)])):
        click.echo(f"{mark}: {note}", err=True)
    failures = found.failures
    if failures:
        mark = click.style("warning", fg="yellow", bold=True)
        click.echo(f"{mark}: {plural(len(failures), 'row')} could not be read and count as wrong:", err=True)
        for name, error in failures[:_SHOWN_FAILURES]:
            click.echo(f"    {error if error.startswith(name) else f'{name}: {error}'}", err=True)
        if len(failures) > _SHOWN_FAILURES:
            click.echo(f"    … and {len(failures) - _SHOWN_FAILURES} more; --json and --report have all", err=True)


def describe(found: Evaluation) -> str:
    """An evaluation for the terminal."""
    parts = [click.style(title_of(found), bold=True), _text(task_table(found)), _text(mean_table(found))]
    if found.routes:
        parts.append(_routing(found))
    parts.append("\n".join(f"{name}: {words}" for name, words in facts(found)))
    return "\n\n".join(parts)


def _routing(found: Evaluation) -> str:
    """Where rows were routed."""
    wrong = mistakes(found)
    if not wrong:
        return "every row was routed to its own task"
    if len(found.tasks) <= _WIDEST_MATRIX:
        return _text(confusion_table(found))
    return "most frequent routing errors\n" + "\n".join(f"  {line}" for line in wrong)


def _text(shown: Table) -> str:
    return table(shown.headers, shown.rows)


def _classes(labels: list[str], metric: str) -> Counter[str]:
    """How many rows have each label."""
    if metric != "micro_f1":
        return Counter(labels)
    return Counter(label for several in labels for label in label_set(several))


def _plan(ready: PreparedEvaluation) -> dict[str, Any]:
    """What would be run, as plain data."""
    return {
        "suite": ready.suite.name,
        "tasks": [
            {
                "task": name,
                "data": data.where,
                "rows": len(data),
                "total": data.total,
                "metric": ready.suite.tasks[name].metric,
                "classes": dict(sorted(_classes(data.labels, ready.suite.tasks[name].metric).items())),
            }
            for name, data in ready.data.items()
        ],
        "shared_labels": ready.shared,
        "notes": ready.notes,
    }


def _passes(ready: PreparedEvaluation, *, oracle: bool, experts: bool) -> list[str]:
    rows = plural(sum(ready.counts.values()), "row")
    passes = [f"{rows} as one stream without task names"]
    if oracle:
        passes.append("rows not routed to their own task alone, with the task given")
    if experts:
        passes.append(f"{rows} through the experts: {', '.join(ready.data)}")
        passes.append(f"{rows} by one pass: the base with these heads")
    return passes


def describe_plan(ready: PreparedEvaluation, passes: list[str]) -> str:
    """What would be run, for the terminal."""
    rows = []
    for task in _plan(ready)["tasks"]:
        known = "" if ready.writes else f" of {len(ready.labels[task['task']])}"
        classes = "numbers" if task["metric"] == "spearman" else f"{len(task['classes'])}{known}"
        rows.append([task["task"], f"{task['rows']:,}", f"{task['total']:,}", classes, task["metric"], task["data"]])
    parts = [
        click.style(f"{ready.suite.name}: {plural(len(rows), 'task')}; nothing is run", bold=True),
        table(["task", "rows", "there are", "classes", "metric", "data"], rows),
        "would run\n" + "\n".join(f"  {line}" for line in passes),
        *([f"{plural(len(ready.shared), 'group')} of shared labels"] if ready.shared else []),
        *ready.notes,
    ]
    return "\n\n".join(parts)
