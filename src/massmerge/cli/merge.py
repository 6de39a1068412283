"""`mass merge`: build a bundle, or with a static method an ordinary checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from massmerge.assemble_static import HEADS
from massmerge.bundle import Bundle, read_manifest
from massmerge.cli.common import BarProgress, print_json, print_problems, seconds, size, table, verb
from massmerge.cli.plan import describe
from massmerge.errors import MassError
from massmerge.evaluation.scales import SPLIT, ScaleChoice, choose_scale, with_scale
from massmerge.merging import merge as run_merge
from massmerge.prepare import Prepared
from massmerge.recipe import Recipe


@click.command()
@click.argument("recipe", type=click.Path(dir_okay=False))
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--workers", type=click.IntRange(min=1), help="Tensors worked on at once; all cores by default.")
@click.option("--overwrite", is_flag=True, help="Replace a bundle that is there. What is no bundle is never replaced.")
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
@click.option("--suite", type=click.Path(dir_okay=False),
              help="Choose the scale of a static merge on the split validation of this suite.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True,
              help="With --suite: at most so many rows of each task, drawn at random.")  # fmt: skip
@verb
def merge(
    recipe: str, out: str, workers: int | None, overwrite: bool, strict: bool, suite: str | None, limit: int,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Merge the experts of RECIPE into the bundle OUT.

    A merge that was killed goes on where it stopped when the same command is run again, and ends in the same bytes.
    """
    quiet = quiet or as_json
    progress = BarProgress(quiet=quiet)
    began = time.perf_counter()

    def show(prepared: Prepared) -> None:
        if not quiet:
            click.echo(describe(prepared.plan) + "\n", err=True)
        print_problems(prepared.plan.problems)

    choice = _chosen(recipe, suite, Path(out), limit, workers, quiet=quiet) if suite is not None else None
    given = Recipe.load(recipe) if choice is None else with_scale(Recipe.load(recipe), choice.scale)
    try:
        path = run_merge(
            given, out, folder=Path(recipe).resolve().parent, workers=workers, overwrite=overwrite, strict=strict,
            progress=progress, planned=show,
        )  # fmt: skip
    except KeyboardInterrupt:
        raise MassError("stopped. The same command goes on where it stopped, and ends in the same bytes.") from None
    finally:
        progress.close()
    print_problems(progress.problems)
    took = time.perf_counter() - began
    summary = _summary(path, took)
    if choice is not None:
        summary["scales"] = {str(scale): round(figure, 4) for scale, figure in choice.figures.items()}
    if as_json:
        print_json(summary)
    elif not quiet:
        click.echo(_sentence(out, summary))


def _chosen(recipe: str, suite: str, out: Path, limit: int, workers: int | None, *, quiet: bool) -> ScaleChoice:
    """The scale that does best on the suite's validation rows, and what each candidate gave."""

    def progress(items: Iterable[Any], what: str, total: int) -> Iterable[Any]:
        return tqdm(items, what, total, leave=False, disable=quiet or None, delay=1.0)

    target = out.resolve()
    work = target.parent / f".{target.name}.unscaled"
    choice = choose_scale(recipe, suite, work, limit=limit, workers=workers, progress=progress)
    if not quiet:
        rows = [[scale, f"{100 * figure:.1f} %"] for scale, figure in choice.figures.items()]
        click.echo(table(["scale", "mean over the tasks"], rows), err=True)
        click.echo(f"scale {choice.scale}, which does best on the split {SPLIT}\n", err=True)
    return choice


def _summary(path: Path, took: float) -> dict[str, object]:
    manifest = read_manifest(path)
    written = sum(int(entry["bytes"]) for entry in manifest["files"].values())
    summary: dict[str, object] = {
        "path": str(path), "method": manifest["method"], "bytes": written, "seconds": round(took, 2),
    }  # fmt: skip
    summary |= {name: manifest[name] for name in ("scale", "needed_bytes") if name in manifest}
    if manifest["method"] == "mass":
        bundle = Bundle(path, check=False)
        ratio = round(bundle.counted_bytes / bundle.base_bytes, 4)
        summary |= {"tasks": [t.name for t in bundle.tasks], "base_bytes": bundle.base_bytes, "ratio": ratio}
    return summary


def _sentence(out: str, summary: dict[str, object]) -> str:
    done = f"{out}: {size(float(str(summary['bytes'])))} in {seconds(float(str(summary['seconds'])))}"
    if summary["method"] == "mass":
        return f"{done}, {summary['ratio']} times the base without heads. Next: mass inspect {out}"
    if (Path(out) / HEADS).is_dir():
        return f"{done}. Next: AutoModel.from_pretrained({out!r})"
    needed = size(float(str(summary["needed_bytes"])))
    return f"{done}; compressed it is {needed}, the base included. Next: AutoModel.from_pretrained('{out}/TASK')"
