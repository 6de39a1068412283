"""`mass remove`: tasks less for a bundle."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from massmerge.cli.calibrate import run_and_fit
from massmerge.cli.common import verb
from massmerge.cli.merged import change_options, refuse_inside, show_written
from massmerge.cli.plan import show_plan
from massmerge.merging.change import prepare_removal
from massmerge.merging.change import remove as run_remove
from massmerge.merging.run import check_target


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...")
@change_options
@verb
def remove(
    bundle: str, tasks: tuple[str, ...], out: str | None, workers: int | None, engine: str | None, overwrite: bool,
    strict: bool, dry_run: bool, device: str, dtype: str, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Remove TASKS from BUNDLE; the other tasks stay unchanged, and no expert is needed.

    What a budget would give the others now is not in the bundle: that takes a merge of their experts.
    """
    if dry_run:
        prepared = prepare_removal(bundle, tasks)
        check_target(prepared, out, overwrite=overwrite)
        show_plan(prepared.plan, tensors=False, strict=strict, as_json=as_json, quiet=quiet)
    else:
        refuse_inside(out or bundle)
        work = partial(
            run_remove, bundle, tasks, out=out, workers=workers, engine=engine, overwrite=overwrite, strict=strict
        )
        summary, _ = run_and_fit(
            work, bundle, out or bundle, Path(), quiet=quiet or as_json, device=device, dtype=dtype
        )
        show_written(out or bundle, summary, as_json=as_json, quiet=quiet)
