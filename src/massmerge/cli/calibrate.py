"""`mass calibrate`: fit a router on a few unlabelled inputs per task."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click

from massmerge.bundle.download import refuse_hub
from massmerge.bundle.merge_folder import recover
from massmerge.bundle.reader import Bundle
from massmerge.cli.common import print_json, verb
from massmerge.cli.merged import refuse_inside
from massmerge.errors import InputError
from massmerge.io.rows import is_file_or_folder, read_inputs
from massmerge.model.calibrate import calibrate as fit
from massmerge.routing.routers import FITTED


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.option("--inputs", multiple=True, required=True, metavar="TASK=PATH",
              help="Inputs of a task: a .txt file, a folder, a table. Repeat for each task.")  # fmt: skip
@click.option("--column", help="Column of a table that holds the inputs.")
@click.option("--kind", type=click.Choice(FITTED), default="prototype", show_default=True,
              help="Mean activation, all activations, or a small network trained on them.")  # fmt: skip
@click.option("--count", type=click.IntRange(min=1), default=16, show_default=True, help="Inputs per task.")
@verb
def calibrate(
    bundle: str, inputs: tuple[str, ...], column: str | None, kind: str, count: int, as_json: bool, quiet: bool
) -> None:
    """Fit a router of BUNDLE on a few inputs per task; labels are not needed.

    The bundle uses this router from then on.
    """
    refuse_hub(bundle)
    refuse_inside(bundle)
    recover(Path(bundle))
    image = Bundle(bundle, check=False).takes_images
    rows: dict[str, Iterator[object]] = {}
    for entry in inputs:
        task, path = _task_and_path(entry)
        found = (_good(row.item) for row in read_inputs([path], image=image, column=column))
        rows[task] = chain(rows.get(task, ()), found)
    used = fit(bundle, rows, kind=kind, count=count)
    if as_json:
        print_json({"kind": kind, "inputs": used})
    elif not quiet:
        total = ", ".join(f"{task} {number}" for task, number in used.items())
        click.echo(f"{bundle}: now routes by {kind}, fitted on {total} inputs")


def _task_and_path(entry: str) -> tuple[str, str]:
    """A task and the file or folder of its inputs; a text in their place is refused, for it would be a path mistyped."""
    task, equals, path = entry.partition("=")
    if not equals:
        raise InputError(f"{entry!r}: write --inputs task=path.")
    if not path:
        raise InputError(f"{entry!r}: the path is missing; write --inputs task=path.")
    if not is_file_or_folder(path):
        raise InputError(f"inputs of {task}: {path}: no such file or folder.")
    return task, path


def _good(item: object) -> object:
    if isinstance(item, InputError):
        raise item
    return item
