"""`mass inspect`: what a bundle holds."""

from __future__ import annotations

from dataclasses import asdict

import click

from massmerge.bundle.inspect import Inspection, TaskReport, cosine_text, inspect_bundle
from massmerge.cli.common import print_json, size, table, verb
from massmerge.errors import InputError


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.option(
    "--plot", type=click.Path(dir_okay=False), help="Plot energy kept and similarity to this file (PNG, SVG, PDF)."
)
@click.option("--sites", is_flag=True, help="List the routing sites instead.")
@verb
def inspect(bundle: str, plot: str | None, sites: bool, as_json: bool, quiet: bool) -> None:
    """Show what is in BUNDLE: tasks, labels, ranks, sizes, energy kept, similarity, what the redundancy filter left out."""
    if sites and plot:
        raise InputError("--sites lists sites, --plot draws energy and similarity. Choose one.")
    if sites:
        _list_sites(bundle, as_json=as_json, quiet=quiet)
        return
    report = inspect_bundle(bundle, plot=plot)
    if as_json:
        print_json(report.to_dict())
    elif not quiet:
        click.echo(describe(report))
        if plot:
            click.echo(f"\nplot in {plot}")


def _list_sites(bundle: str, *, as_json: bool, quiet: bool) -> None:
    """Every site with its depth and width, and which of them vote."""
    from massmerge.model.load import load

    model = load(bundle, router="projection", check=True)
    voting = {voter.rpartition(".")[0] for voter in model.voters}
    if as_json:
        print_json([{**asdict(site), "votes": site.name in voting} for site in model.sites])
    elif not quiet:
        rows = [
            [s.name, f"{s.depth:.0%}", s.width, ", ".join(s.modules), "votes" if s.name in voting else ""]
            for s in model.sites
        ]
        click.echo(table(["site", "depth", "width", "layers that read it", ""], rows))
        click.echo(f"\nvoters: {' '.join(model.voters)}")


def describe(report: Inspection) -> str:
    """A report for the terminal."""
    names = [t.name for t in report.tasks]
    fixed = bool(report.sizes["fixed model"])
    tasks = [
        [t.name, t.form, _labels(t), f"{t.rank_low} to {t.rank_high}" if t.rank_high != t.rank_low else t.rank_low,
         f"{t.energy:.1%}", size(t.nbytes), *[f"{len(t.left_out)} matrices" if t.left_out else "-"] * fixed]
        for t in report.tasks
    ]  # fmt: skip
    parts = [
        f"{report.path}: {len(names)} tasks on {report.base} ({report.base_class})"
        + ("" if report.factors == "base" else f", factors in {report.factors}"),
        table(["task", "form", "labels", "rank", "energy kept", "size", *["left out of fixed model"] * fixed], tasks),
        table(
            ["part", "size", "of the base"],
            [
                [n, size(b), f"{b / report.base_bytes:.3f}"]
                for n, b in report.sizes.items()
                if b or n not in ("fixed model", "router")
            ],
        )
        + f"\n{report.ratio:.3f} times the base, heads not counted",
        "energy kept, by block\n"
        + table(["block", *names], [[block, *(f"{v:.1%}" for v in row)] for block, row in report.blocks.items()]),
        "similarity of the tasks (cosine of their deltas)\n"
        + table(
            ["", *names],
            [[n, *map(cosine_text, row)] for n, row in zip(names, report.similarity, strict=True)],
        ),
    ]
    if report.overlap is not None and report.overlap_by_chance is not None:
        parts.insert(
            -1,
            "overlap of the tasks' routing subspaces at the voting sites (tasks that share much are confused; by chance "
            f"{report.overlap_by_chance:.2f})\n"
            + table(["", *names], [[n, *map(cosine_text, row)] for n, row in zip(names, report.overlap, strict=True)]),
        )
    for task in report.tasks:
        if task.left_out:
            shown = ", ".join(task.left_out[:4]) + (
                f" and {len(task.left_out) - 4} more" if len(task.left_out) > 4 else ""
            )
            parts.append(f"{task.name} is left out of the fixed model at {shown}")
    return "\n\n".join(parts)


def _labels(task: TaskReport) -> str:
    if task.labels is None:
        return "none"
    if task.problem_type == "regression":
        return f"a number: {task.labels[0]}"
    shown = ", ".join(task.labels[:3])
    several = ", any number of them" if task.problem_type == "multi_label_classification" else ""
    return f"{len(task.labels)}: {shown}{', …' if len(task.labels) > 3 else ''}{several}"
