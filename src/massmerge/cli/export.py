"""`mass export`: a bundle's tasks for other software."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import click
from safetensors import SafetensorError

from massmerge.cli.common import counting, plural, print_json, size, table, verb, writing
from massmerge.errors import InputError, MassError
from massmerge.model.export import FORMS, Exported, export_bundle
from massmerge.model.export.layout import Adapters


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.argument("target", type=click.Path())
@click.option("--to", "form", type=click.Choice(FORMS), required=True, help="What to write.")
@click.option("--tasks", help="Comma-separated names: the tasks to write, or the set for hf and onnx.")
@click.option(
    "--adapters",
    type=click.Choice(get_args(Adapters)),
    show_default="together",
    help="For peft: adapters that one model can hold together, smaller ones for one model each, or plain LoRA.",
)
@verb
def export(
    bundle: str, target: str, form: str, tasks: str | None, adapters: Adapters | None, as_json: bool, quiet: bool
) -> None:
    """Write tasks of BUNDLE to the folder TARGET in a format that other software reads.

    peft: each task as a PEFT adapter. hf: one set of tasks as a transformers checkpoint. onnx: one set as an ONNX file.
    Outputs are compared with the bundle's before TARGET appears.
    """
    if adapters is not None and form != "peft":
        raise InputError(
            f"--adapters {adapters} is for --to peft; --to {form} writes no adapters. Leave one of them out."
        )
    _refuse_below_file(target)
    names = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    with counting(quiet or as_json, "task") as progress, _writing(target):
        result = export_bundle(bundle, target, form, names, adapters=adapters or "together", progress=progress)  # type: ignore[arg-type]
    if as_json:
        print_json(result.to_dict())
    elif not quiet:
        click.echo(describe(result))
    if not as_json:
        _tell_left_out(result, "--adapters together" if adapters == "lora" else "--to hf")


def _refuse_below_file(target: str) -> None:
    """Folders above the target are made, but not where a file is."""
    above = next(path for path in Path(target).absolute().parents if path.exists())
    if not above.is_dir():
        raise InputError(f"{target}: cannot be created because {above} is not a folder. Choose another target.")


@contextmanager
def _writing(target: str) -> Iterator[None]:
    """Errors of the disk with the name of the target; those of safetensors are no OSError."""
    try:
        with writing(target):
            yield
    except SafetensorError as error:  # of what was written: the checksums of the bundle have been compared
        raise MassError(f"{target}: cannot be written ({error}).") from None


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
        told = f"left out {count}, {total:.2%} of the delta: {shown}. {remedy} includes them; --json lists all."
        click.echo(f"warning: {part.name}: {told}", err=True)
