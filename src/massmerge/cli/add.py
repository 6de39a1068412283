"""`mass add`: tasks more for a bundle, without the experts of the others."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from massmerge.cli.calibrate import paths_of, run_and_fit, show_calibration
from massmerge.cli.common import verb
from massmerge.cli.merged import change_options, refuse_inside, show_written
from massmerge.cli.plan import show_plan
from massmerge.errors import InputError
from massmerge.merging.change import Addition, prepare_addition
from massmerge.merging.change import add as run_add
from massmerge.merging.run import check_target


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.argument("tasks", nargs=-1, required=True, metavar="TASK=EXPERT... | FILE.yaml")
@click.option("--inputs", multiple=True, metavar="TASK=PATH",
              help="Unlabelled inputs of a new task, with which a calibrated router is fitted again.")  # fmt: skip
@click.option("--column", help="Column of a table that holds the inputs.")
@change_options
@verb
def add(
    bundle: str, tasks: tuple[str, ...], inputs: tuple[str, ...], column: str | None, out: str | None,
    workers: int | None, engine: str | None, overwrite: bool, strict: bool, dry_run: bool, device: str, dtype: str,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Add tasks to BUNDLE, without the experts of its other tasks.

    Write each task as TASK=EXPERT: a name and a folder, file or hub id. To give heads or labels too, write a YAML file with
    `tasks:` as in a recipe.
    """
    given, folder = _given(tasks)
    if inputs:
        given = given.with_inputs({t: Path(p).resolve() for t, p in paths_of(inputs).items()}, column)
    if dry_run:
        prepared = prepare_addition(bundle, given, folder=folder, download=False)
        check_target(prepared, out, overwrite=overwrite)
        show_plan(prepared.plan, tensors=False, strict=strict, as_json=as_json, quiet=quiet)
    else:
        refuse_inside(out or bundle)
        work = partial(
            run_add, bundle, given, folder=folder, out=out, workers=workers, engine=engine, overwrite=overwrite,
            strict=strict, device=device,
        )  # fmt: skip
        summary, calibrated = run_and_fit(
            work, bundle, out or bundle, folder, quiet=quiet or as_json, device=device, dtype=dtype
        )
        show_written(out or bundle, summary, as_json=as_json, quiet=quiet)
        if calibrated is not None and not (quiet or as_json):
            show_calibration(out or bundle, calibrated)


def _given(tasks: tuple[str, ...]) -> tuple[Addition, Path]:
    """The tasks of the command line, or those of a file, and the folder that their paths start from."""
    if len(tasks) == 1 and Path(tasks[0]).suffix.lower() in (".yaml", ".yml"):
        return Addition.load(tasks[0]), Path(tasks[0]).resolve().parent
    found: dict[str, str] = {}
    for entry in tasks:
        name, equals, expert = entry.partition("=")
        if not equals or not name or not expert:
            raise InputError(
                f"{entry!r}: write TASK=EXPERT, or give one file that describes the tasks and ends in .yaml."
            )
        if name in found:
            raise InputError(f"two tasks are called {name!r}: give each its own name.")
        found[name] = expert
    return Addition.of(found), Path()
