"""`mass merge`: build a bundle, or with a static method an ordinary checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from massmerge.bundle.stored import published
from massmerge.cli.calibrate import calibrate_by_recipe, show_calibration
from massmerge.cli.common import engine_option, placement_options, table, verb
from massmerge.cli.merged import run_shown, show_written
from massmerge.evaluation.scales import ScaleChoice, choose_scale, with_scale
from massmerge.evaluation.suite import VALIDATION
from massmerge.io.addresses import is_address
from massmerge.merging.addressed_recipe import load_recipe
from massmerge.merging.run import merge as run_merge


@click.command()
@click.argument("recipe", type=click.Path(dir_okay=False))
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--workers", type=click.IntRange(min=1), help="Tensors processed in parallel; all cores by default.")
@engine_option
@click.option("--overwrite", is_flag=True, help="Replace an existing bundle. Anything else is never replaced.")
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
@click.option("--suite", type=click.Path(dir_okay=False),
              help="Choose the scale of a static merge on the validation split of this suite.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True,
              help="With --suite: at most this many rows per task, drawn at random.")  # fmt: skip
@placement_options
@verb
def merge(
    recipe: str, out: str, workers: int | None, engine: str | None, overwrite: bool, strict: bool, suite: str | None,
    limit: int, device: str, dtype: str, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Merge the experts of RECIPE into the bundle OUT; either may be an address such as s3://bucket/out.

    If interrupted, run the same command to resume. The result is the same, byte for byte.
    """
    quiet = quiet or as_json
    where = {"device": device, "dtype": dtype}
    given, folder = load_recipe(recipe)
    with published(out, overwrite=overwrite, step=partial(_sending, quiet)) as target:
        choice = _chosen(recipe, suite, target, limit, workers, where, quiet=quiet) if suite is not None else None
        given = given if choice is None else with_scale(given, choice.scale)
        summary = run_shown(
            partial(
                run_merge, given, target, folder=folder, workers=workers, engine=engine, overwrite=overwrite,
                strict=strict, device=device,
            ),
            quiet=quiet,
        )  # fmt: skip
        if choice is not None:
            summary["scales"] = {str(scale): round(figure, 4) for scale, figure in choice.figures.items()}
        calibrated = None if given.merge.static else calibrate_by_recipe(str(target), folder, quiet=quiet, **where)
        if calibrated is not None:
            summary["calibration"] = calibrated.plain()
    summary |= {"path": out} if is_address(out) else {}
    show_written(out, summary, as_json=as_json, quiet=quiet)
    if calibrated is not None and not quiet:
        show_calibration(out, calibrated)


def _sending(quiet: bool, name: str) -> None:
    """Tell which file is on its way to an address."""
    if not quiet:
        click.echo(f"sending {name} …", err=True)


def _chosen(
    recipe: str, suite: str, out: Path, limit: int, workers: int | None, where: dict[str, str], *, quiet: bool
) -> ScaleChoice:
    """The scale that does best on the suite's validation rows, and what each candidate gave."""

    def progress(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
        return tqdm(items, what, total, leave=False, disable=quiet or None, delay=1.0)

    target = out.resolve()
    work = target.parent / f".{target.name}.unscaled"
    choice = choose_scale(recipe, suite, work, limit=limit, workers=workers, device=where["device"],
                          dtype=where["dtype"], progress=progress)  # fmt: skip
    if not quiet:
        rows = [[scale, f"{100 * figure:.1f} %"] for scale, figure in choice.figures.items()]
        click.echo(table(["scale", "mean over the tasks"], rows), err=True)
        click.echo(f"scale {choice.scale}, the best on the split {VALIDATION}\n", err=True)
    return choice
