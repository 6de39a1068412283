"""What the verbs share that write a bundle: plan, progress, and what was written."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from massmerge.bundle.manifest import read_manifest
from massmerge.bundle.reader import Bundle
from massmerge.checkpoints.backbone import auto_class
from massmerge.cli.common import (
    BarProgress,
    engine_option,
    placement_options,
    print_json,
    print_problems,
    seconds,
    size,
)
from massmerge.cli.plan import describe
from massmerge.errors import InputError, MassError
from massmerge.io.addresses import is_address
from massmerge.merging.open_recipe import OpenedRecipe

_F = TypeVar("_F", bound=Callable[..., Any])


def change_options(function: _F) -> _F:
    """Add the options of verbs that change a bundle."""
    options = (
        click.option(
            "--out", type=click.Path(file_okay=False), help="Write to this folder, and leave BUNDLE unchanged."
        ),
        click.option("--workers", type=click.IntRange(min=1), help="Tensors worked on at once; all cores by default."),
        engine_option,
        click.option("--overwrite", is_flag=True, help="Replace a bundle that is at --out."),
        click.option("--strict", is_flag=True, help="Treat warnings as errors."),
        click.option("--dry-run", is_flag=True, help="Show what would happen, and write nothing."),
    )
    for option in reversed(options):
        function = option(function)
    return placement_options(function)


def refuse_inside(target: str) -> None:
    """Raise an error if the current folder would be replaced: the shell would be left in a deleted folder."""
    if Path.cwd().is_relative_to(Path(target).resolve()):
        raise InputError(
            f"{target}: the current folder is inside this bundle, which is replaced as a whole. Change to "
            "another folder first."
        )


def run_shown(work: Callable[..., Path], *, quiet: bool) -> dict[str, object]:
    """Run a merge, which takes `progress` and `planned`, with its plan and a bar; what it has written, as plain data."""
    progress = BarProgress(quiet=quiet)
    began = time.perf_counter()

    def show(prepared: OpenedRecipe) -> None:
        """Print the plan and what is wrong with it."""
        if not quiet:
            click.echo(describe(prepared.plan) + "\n", err=True)
        print_problems(prepared.plan.problems)

    try:
        path = work(progress=progress, planned=show)
    except KeyboardInterrupt:
        raise MassError("interrupted. Run the same command to resume.") from None
    finally:
        progress.close()
    print_problems(progress.problems)
    return _summary(path, time.perf_counter() - began)


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


def show_written(out: str, summary: dict[str, object], *, as_json: bool, quiet: bool) -> None:
    """Tell what was written."""
    if as_json:
        print_json(summary)
    elif not quiet:
        click.echo(_sentence(out, summary))


def _sentence(out: str, summary: dict[str, object]) -> str:
    done = f"{out}: {size(float(str(summary['bytes'])))} in {seconds(float(str(summary['seconds'])))}"
    if summary["method"] == "mass":
        return f"{done}, {summary['ratio']} times the base without heads. Next: mass inspect {out}"
    if is_address(out):
        return f"{done}. Next: mass pull {out} FOLDER"
    opener = auto_class(read_manifest(Path(out))["base"]["class"])
    if (Path(out) / "config.json").is_file():
        return f"{done}. Next: {opener}.from_pretrained({out!r})"
    needed = size(float(str(summary["needed_bytes"])))
    return f"{done}; {needed} when compressed, base included. Next: {opener}.from_pretrained('{out}/TASK')"
