"""`mass adapt`: learn from mixed inputs without names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from massmerge.bundle.download import refuse_hub
from massmerge.bundle.merge_folder import recover
from massmerge.bundle.reader import Bundle
from massmerge.cli.calibrate import good, task_inputs
from massmerge.cli.common import counting, placement_options, print_json, table, verb
from massmerge.cli.merged import refuse_inside
from massmerge.errors import InputError
from massmerge.io.rows import is_file_or_folder, read_inputs
from massmerge.model.adapt import MOST, Adaptation
from massmerge.model.adapt import adapt as fit

RESERVOIR = ".safetensors"


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.argument("inputs", nargs=-1, required=True)
@click.option("--column", help="Column of a table that holds the inputs.")
@click.option("--check", multiple=True, metavar="TASK=PATH",
              help="Inputs whose task is known, to judge by. Repeat for each task.")  # fmt: skip
@click.option("--count", type=click.IntRange(min=1), default=MOST, show_default=True, help="Inputs at most.")
@placement_options
@verb
def adapt(
    bundle: str, inputs: tuple[str, ...], column: str | None, check: tuple[str, ...], count: int, device: str, dtype: str,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Adapt BUNDLE to INPUTS: mixed inputs without names, or the reservoir of a service.

    The bundle stays as it is unless routing gets better on inputs that were left out.
    """
    refuse_hub(bundle)
    refuse_inside(bundle)
    recover(Path(bundle))
    image = Bundle(bundle, check=False).takes_images
    named = task_inputs(check, image=image, column=column)
    if missing := [path for path in inputs if not is_file_or_folder(path)]:
        raise InputError(f"{', '.join(missing)}: no such file or folder.")
    reservoirs = [path for path in inputs if path.endswith(RESERVOIR)]
    if reservoirs and len(inputs) > 1:
        raise InputError("give one reservoir, or files of inputs.")
    rows: Iterator[object] = (good(row.item) for row in read_inputs(list(inputs), image=image, column=column))
    with counting(quiet or as_json, "input") as step:
        given = Path(reservoirs[0]) if reservoirs else rows
        done = fit(bundle, given, check=named, count=count, device=device, dtype=dtype, progress=step)
    if as_json:
        print_json(done.plain())
    elif not quiet:
        show_adaptation(bundle, done)


def show_adaptation(bundle: str, done: Adaptation) -> None:
    """What was tried, and whether the bundle has changed."""
    measure = "right tasks" if done.judged_by == "names" else "inputs on which two halves of the voters agree"
    rows = [["as it was", f"{100 * done.before:.1f}"]]
    rows += [[way, f"{100 * share:.1f}"] for way, share in done.tried.items()]
    click.echo(table(["routing", f"{measure} in %"], rows))
    if done.way is None:
        click.echo(f"{bundle}: unchanged, {done.inputs} inputs do not show that routing would get better")
    else:
        click.echo(f"{bundle}: now routes {done.way} over {done.inputs} inputs")
