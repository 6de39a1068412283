"""`mass export`: a bundle's tasks for other software."""

from __future__ import annotations

from typing import get_args

import click

from massmerge.cli.common import counting, plural, print_json, size, table, verb
from massmerge.export import FORMS, Exported, export_bundle
from massmerge.export.layout import Adapters


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.argument("target", type=click.Path())
@click.option("--to", "form", type=click.Choice(FORMS), required=True, help="What to write.")
@click.option("--tasks", help="Names with commas between: the tasks to write, or the set for hf and onnx.")
@click.option(
    "--adapters",
    type=click.Choice(get_args(Adapters)),
    default="together",
    show_default=True,
    help="For peft: adapters that one model can hold together, smaller ones for a model alone, or nothing but LoRA.",
)
@verb
def export(bundle: str, target: str, form: str, tasks: str | None, adapters: str, as_json: bool, quiet: bool) -> None:
    """Write tasks of BUNDLE to the folder TARGET in a form that other software reads.

    peft: each task as a PEFT adapter. hf: one set of tasks as a checkpoint of transformers. onnx: one set as an ONNX file.
    Outputs are compared with the bundle's before TARGET appears.
    """
    names = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    with counting(quiet or as_json, "task") as progress:
        result = export_bundle(bundle, target, form, names, adapters=adapters, progress=progress)  # type: ignore[arg-type]
    if as_json:
        print_json(result.to_dict())
    elif not quiet:
        click.echo(describe(result))
    if not as_json:
        _tell_left_out(result, "--adapters together" if adapters == "lora" else "--to hf")


def describe(result: Exported) -> str:
    """An export for the terminal."""
    rows = [
        [p.name, p.path, size(p.nbytes), "-" if p.rank is None else p.rank, p.head, f"{p.difference:.1e}"]
        for p in result.parts
    ]
    columns = ["tasks" if result.form != "peft" else "task", "folder", "size", "rank", "head", "difference of outputs"]
    return f"{result.path}: {result.form}\n\n" + table(columns, rows)


def _tell_left_out(result: Exported, remedy: str) -> None:
    """Say on standard error what is not in what was written, how much of the change that is, and what holds it."""
    for part in result.parts:
        if not part.left_out:
            continue
        total = sum(part.left_out.values())
        largest = sorted(part.left_out, key=part.left_out.__getitem__, reverse=True)
        shown = ", ".join(largest[:3]) + (f" and {len(largest) - 3} more" if len(largest) > 3 else "")
        count = plural(len(largest), "tensor")
        told = f"left out {count}, {total:.2%} of the change: {shown}. {remedy} holds them; --json lists all."
        click.echo(f"warning: {part.name}: {told}", err=True)
