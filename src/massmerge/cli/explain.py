"""`mass explain`: why an input is answered as it is."""

from __future__ import annotations

import sys

import click

from massmerge.cli.common import escaped, placement_options, print_json, table, verb
from massmerge.errors import InputError
from massmerge.io.rows import read_inputs
from massmerge.model.explain import Explanation, answer_in_words, confidence_in_words, plot_explanation
from massmerge.model.explain import explain as explain_input
from massmerge.model.load import load

_WIDTH = 30


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.argument("item", metavar="INPUT")
@click.option("--task", "tasks", multiple=True, help="Choose among these tasks only. May be repeated.")
@click.option("--column", help="Column of a .csv, .jsonl or .parquet file that holds the input.")
@click.option("--top", type=click.IntRange(min=1), default=3, show_default=True, help="Labels to show per head.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Plot it to this file (PNG, SVG, PDF).")
@placement_options
@verb
def explain(
    bundle: str, item: str, tasks: tuple[str, ...], column: str | None, top: int, plot: str | None, device: str,
    dtype: str, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Show how BUNDLE answers INPUT: residual and weight of every task, selected set, heads, time."""
    model = load(bundle, device=device, dtype=dtype, check=True)
    inputs = list(read_inputs([item], image=model.takes_images, column=column, stdin=sys.stdin))
    if len(inputs) != 1:
        raise InputError(f"{item}: holds {len(inputs)} inputs; explain one at a time.")
    if isinstance(inputs[0].item, InputError):
        raise inputs[0].item
    found = explain_input(model, inputs[0].item, top=top, task=list(tasks) or None)
    if plot:
        plot_explanation(found, escaped(inputs[0].name), plot)
    if as_json:
        print_json(found.to_dict())
    elif not quiet:
        click.echo(describe(found))
        if plot:
            click.echo(f"\nplot in {plot}")


def describe(found: Explanation) -> str:
    """An explanation for the terminal."""
    prediction, routing = found.prediction, found.prediction.routing
    assert routing is not None
    if prediction.task is None:
        head = click.style("unknown: no task explains this input well enough", bold=True)
    else:
        head = click.style(answer_in_words(prediction), bold=True)
    parts = [head]
    rows = []
    for name in sorted(routing.weights, key=lambda n: -routing.weights[n]):
        weight, residual = routing.weights[name], routing.residuals.get(name)
        mark = "selected" if name in routing.selected else ""
        bar = "█" * round(weight * _WIDTH) + "·" * (_WIDTH - round(weight * _WIDTH))
        rows.append([name, "" if residual is None else f"{residual:.3f}", f"{weight:.3f}", bar, mark])
    parts.append(table(["task", "residual", "weight", "", ""], rows))
    evidence = []
    if prediction.confidence is not None:
        evidence.append(confidence_in_words(prediction))
    evidence.append(f"voters: {routing.site}")
    if routing.margin is not None:
        evidence.append(
            f"margin: the best task leads the next by {routing.margin:.2f} standard deviations over the tasks"
        )
    if routing.lift is not None:
        evidence.append(f"lift: the best task holds {routing.lift:.2f} times what a random subspace of its size would")
    if routing.agreement is not None:
        evidence.append(f"agreement of the voters: {routing.agreement:.0%}")
    if routing.typicality is not None:
        evidence.append(f"typicality: {routing.typicality:.0%} of the tasks' own inputs are less typical")
    if routing.confidences:
        asked = ", ".join(f"{task} {sure:.2f}" for task, sure in routing.confidences.items())
        evidence.append(f"unclear, so several tasks answered; confidence of their heads: {asked}")
    parts.append("\n".join(evidence))
    if found.heads:
        labels = [
            [a.task, a.label, "-" if a.score is None else f"{a.score:.3f}", f"{a.logit:.3f}"]
            for answers in found.heads.values()
            for a in answers
        ]
        parts.append(table(["head", "label", "score", "logit"], labels))
    spent = [f"{name} {value:.1f} ms" for name, value in prediction.timings.items() if name != "inputs"]
    parts.append("time: " + ", ".join(spent))
    return "\n\n".join(parts)
