"""`mass inspect`: what a bundle holds."""

from __future__ import annotations

import click

from massmerge.bundle import Bundle
from massmerge.cli.common import print_json, size, table, verb
from massmerge.inspection import Inspection, inspect_bundle, plot_inspection


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.option(
    "--plot", type=click.Path(dir_okay=False), help="Draw kept energy and similarity to this file (PNG, SVG, PDF)."
)
@verb
def inspect(bundle: str, plot: str | None, as_json: bool, quiet: bool) -> None:
    """Look into BUNDLE: tasks, labels, ranks, sizes, kept energy, similarity, what the redundancy filter left out."""
    report = inspect_bundle(Bundle(bundle))
    if plot:
        plot_inspection(report, plot)
    if as_json:
        print_json(report.to_dict())
    elif not quiet:
        click.echo(describe(report))
        if plot:
            click.echo(f"\ndrawn to {plot}")


def describe(report: Inspection) -> str:
    """A report for the terminal."""
    names = [t.name for t in report.tasks]
    tasks = [
        [t.name, t.form, _labels(t.labels), f"{t.rank_low} to {t.rank_high}" if t.rank_high != t.rank_low else t.rank_low,
         f"{t.energy:.1%}", size(t.nbytes), f"{len(t.left_out)} matrices" if t.left_out else "-"]
        for t in report.tasks
    ]  # fmt: skip
    parts = [
        f"{report.path}: {len(names)} tasks on {report.base} ({report.base_class})",
        table(["task", "form", "labels", "rank", "energy kept", "size", "left out of fixed model"], tasks),
        table(
            ["part", "size", "of the base"],
            [[n, size(b), f"{b / report.base_bytes:.3f}"] for n, b in report.sizes.items()],
        )
        + f"\n{report.ratio:.3f} times the base, heads not counted",
        "energy kept, by block\n"
        + table(["block", *names], [[block, *(f"{v:.1%}" for v in row)] for block, row in report.blocks.items()]),
        "similarity of the tasks (cosine of their deltas)\n"
        + table(
            ["", *names],
            [
                [n, *(f"{v + 0.0:.2f}".replace("-0.00", "0.00") for v in row)]
                for n, row in zip(names, report.similarity, strict=True)
            ],
        ),
    ]
    for task in report.tasks:
        if task.left_out:
            shown = ", ".join(task.left_out[:4]) + (
                f" and {len(task.left_out) - 4} more" if len(task.left_out) > 4 else ""
            )
            parts.append(f"{task.name} is left out of the fixed model at {shown}")
    return "\n\n".join(parts)


def _labels(labels: tuple[str, ...] | None) -> str:
    if labels is None:
        return "none"
    shown = ", ".join(labels[:3])
    return f"{len(labels)}: {shown}{', …' if len(labels) > 3 else ''}"
