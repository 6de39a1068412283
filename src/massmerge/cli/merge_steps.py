"""What `mass merge` does, with the libraries that it needs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from massmerge.bundle.stored import published
from massmerge.cli.common import bars, table
from massmerge.cli.merged import run_shown, show_written
from massmerge.io.addresses import is_address
from massmerge.merging.run import merge as run_merge
from massmerge.recipe import Recipe

if TYPE_CHECKING:
    from massmerge.evaluation.scales import ScaleChoice
    from massmerge.model.calibrate import Calibration


def run(
    given: Recipe, folder: Path, out: str, *, recipe: str, workers: int | None, engine: str | None, overwrite: bool,
    strict: bool, suite: str | None, limit: int, where: dict[str, str], as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Merge, and tell of it.

    Args:
        given: the recipe.
        folder: what its relative paths start from.
        out: the folder or address to write.
        recipe: where the recipe was read.
        workers: as in `massmerge.merge`, like `engine`, `overwrite` and `strict`.
        engine: where the work runs.
        overwrite: replace a bundle.
        strict: treat warnings as errors.
        suite: labelled rows that the scale of a static merge is chosen on.
        limit: at most so many of each task.
        where: device and type of what is run.
        as_json: print the result as JSON.
        quiet: show no progress.
    """
    with published(out, overwrite=overwrite, step=partial(_sending, quiet)) as target:
        choice = _chosen(recipe, suite, target, limit, workers, where, quiet=quiet) if suite is not None else None
        if choice is not None:
            given = choice.recipe(given)
        summary = run_shown(
            partial(
                run_merge, given, target, folder=folder, workers=workers, engine=engine, overwrite=overwrite,
                strict=strict, device=where["device"],
            ),
            quiet=quiet,
        )  # fmt: skip
        if choice is not None:
            summary["scales"] = {str(scale): round(figure, 4) for scale, figure in choice.figures.items()}
        calibrated = None if given.merge.static else _calibrated(target, folder, quiet, where)
        if calibrated is not None:
            summary["calibration"] = calibrated.plain()
    summary |= {"path": out} if is_address(out) else {}
    show_written(out, summary, as_json=as_json, quiet=quiet)
    if calibrated is not None and not quiet:
        from massmerge.cli.calibrate import show_calibration

        show_calibration(out, calibrated)


def _calibrated(out: Path, folder: Path, quiet: bool, where: dict[str, str]) -> Calibration | None:
    """A router that is fitted on the inputs which the recipe names, if it names some."""
    from massmerge.cli.calibrate import calibrate_by_recipe  # runs models, which a static merge need not import

    return calibrate_by_recipe(str(out), folder, quiet=quiet, **where)


def _sending(quiet: bool, name: str) -> None:
    """Tell which file is on its way to an address."""
    if not quiet:
        click.echo(f"sending {name} …", err=True)


def _chosen(
    recipe: str, suite: str, out: Path, limit: int, workers: int | None, where: dict[str, str], *, quiet: bool
) -> ScaleChoice:
    """The scale that does best on the suite's validation rows, and what each candidate gave."""
    from massmerge.evaluation.scales import choose_scale  # runs models too
    from massmerge.evaluation.suite import VALIDATION

    target = out.resolve()
    work = target.parent / f".{target.name}.unscaled"
    choice = choose_scale(recipe, suite, work, limit=limit, workers=workers, device=where["device"],
                          dtype=where["dtype"], progress=bars(hidden=quiet))  # fmt: skip
    if not quiet:
        rows = [[scale, f"{100 * figure:.1f} %"] for scale, figure in choice.figures.items()]
        click.echo(table(["scale", "mean over the tasks"], rows), err=True)
        click.echo(f"scale {choice.scale}, the best on the split {VALIDATION}\n", err=True)
    return choice
