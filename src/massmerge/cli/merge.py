"""`mass merge`: build a bundle, or with a static method an ordinary checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

import click

from massmerge.bundle import Bundle, read_manifest
from massmerge.cli.common import BarProgress, print_json, print_problems, seconds, size, verb
from massmerge.cli.plan import describe
from massmerge.merge import merge as run_merge
from massmerge.prepare import Prepared


@click.command()
@click.argument("recipe", type=click.Path(dir_okay=False))
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--workers", type=click.IntRange(min=1), help="Tensors worked on at once; all cores by default.")
@click.option("--overwrite", is_flag=True, help="Replace a bundle that is there. What is no bundle is never replaced.")
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
@verb
def merge(
    recipe: str, out: str, workers: int | None, overwrite: bool, strict: bool, as_json: bool, quiet: bool
) -> None:
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

    try:
        path = run_merge(
            recipe, out, workers=workers, overwrite=overwrite, strict=strict, progress=progress, planned=show
        )
    finally:
        progress.close()
    print_problems(progress.problems)
    took = time.perf_counter() - began
    summary = _summary(path, took)
    if as_json:
        print_json(summary)
    elif not quiet:
        click.echo(_sentence(out, summary))


def _summary(path: Path, took: float) -> dict[str, object]:
    manifest = read_manifest(path)
    written = sum(int(entry["bytes"]) for entry in manifest["files"].values())
    summary: dict[str, object] = {
        "path": str(path), "method": manifest["method"], "bytes": written, "seconds": round(took, 2),
    }  # fmt: skip
    if manifest["method"] == "mass":
        bundle = Bundle(path, check=False)
        ratio = round(bundle.counted_bytes / bundle.base_bytes, 4)
        summary |= {"tasks": [t.name for t in bundle.tasks], "base_bytes": bundle.base_bytes, "ratio": ratio}
    return summary


def _sentence(out: str, summary: dict[str, object]) -> str:
    done = f"{out}: {size(float(str(summary['bytes'])))} in {seconds(float(str(summary['seconds'])))}"
    if summary["method"] == "mass":
        return f"{done}, {summary['ratio']} times the base without heads. Next: mass inspect {out}"
    return f"{done}. Next: AutoModel.from_pretrained({out!r})"
