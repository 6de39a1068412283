"""`mass merge`: build a bundle, or with a static method an ordinary checkpoint."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from massmerge.cli.common import engine_option, placement_options, verb
from massmerge.cli.libraries import with_libraries
from massmerge.io.sums_ahead import sums_ahead
from massmerge.merging.addressed_recipe import load_recipe
from massmerge.recipe import Recipe

_LEAST, _MOST = 1 << 22, 2_000_000_000  # bytes of files whose checksums are there when the libraries are


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
    given, folder = load_recipe(recipe)
    with sums_ahead(_weights(given, folder)):
        run = with_libraries("massmerge.cli.merge_steps").run
        run(
            given, folder, out, recipe=recipe, workers=workers, engine=engine, overwrite=overwrite, strict=strict,
            suite=suite, limit=limit, where={"device": device, "dtype": dtype}, as_json=as_json, quiet=quiet or as_json,
        )  # fmt: skip


def _weights(recipe: Recipe, folder: Path) -> list[Path]:
    """Files of weights on this machine, which the merge will ask the checksums of."""
    files: dict[Path, None] = {}
    for text in (recipe.base, *(task.expert for task in recipe.tasks)):
        with suppress(OSError, ValueError, RuntimeError):  # names that cannot be a file's are told by the merge
            place = (folder / Path(text).expanduser()).resolve()
            found = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
            files |= {path: None for path in found if _LEAST < path.stat().st_size < _MOST}
    return list(files)
