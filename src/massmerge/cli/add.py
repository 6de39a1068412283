"""`mass add`: tasks more for a bundle, without the experts of the others."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from massmerge.cli.calibrate import calibrate_by_recipe, show_calibration
from massmerge.cli.common import verb
from massmerge.cli.merged import change_options, refuse_inside, run_shown, show_written
from massmerge.cli.plan import show_plan
from massmerge.errors import InputError
from massmerge.merging.change import add as run_add
from massmerge.merging.change import prepare_addition
from massmerge.merging.run import check_target


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.argument("tasks", nargs=-1, required=True, metavar="TASK=EXPERT... | FILE.yaml")
@change_options
@verb
def add(
    bundle: str, tasks: tuple[str, ...], out: str | None, workers: int | None, overwrite: bool, strict: bool,
    dry_run: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Add tasks to BUNDLE, without the experts of its other tasks.

    Write each task as TASK=EXPERT: a name and a folder, file or hub id. To give heads or labels too, write a YAML file with
    `tasks:` as in a recipe.
    """
    given = _given(tasks)
    if dry_run:
        prepared = prepare_addition(bundle, given, download=False)
        check_target(prepared, out, overwrite=overwrite)
        show_plan(prepared.plan, tensors=False, strict=strict, as_json=as_json, quiet=quiet)
    else:
        refuse_inside(out or bundle)
        work = partial(run_add, bundle, given, out=out, workers=workers, overwrite=overwrite, strict=strict)
        summary = run_shown(work, quiet=quiet or as_json)
        folder = given.resolve().parent if isinstance(given, Path) else Path()
        calibrated = calibrate_by_recipe(out or bundle, folder, quiet=quiet or as_json)
        if calibrated is not None:
            summary["calibration"] = calibrated.plain()
        show_written(out or bundle, summary, as_json=as_json, quiet=quiet)
        if calibrated is not None and not (quiet or as_json):
            show_calibration(out or bundle, calibrated)


def _given(tasks: tuple[str, ...]) -> dict[str, str] | Path:
    """The tasks of the command line, or the file that describes them."""
    if len(tasks) == 1 and Path(tasks[0]).suffix.lower() in (".yaml", ".yml"):
        return Path(tasks[0])
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
    return found
