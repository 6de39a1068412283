"""`mass verify`: proof that a bundle is right."""

from __future__ import annotations

import sys

import click

from massmerge.cli.common import counting, device_option, print_json, table, verb
from massmerge.merging.verify import Verification, verify_bundle


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.option("--experts", is_flag=True, help="Compare every delta with the original expert's.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False),
    help="Where relative paths of the recipe start; the current folder by default.",
)
@device_option
@verb
def verify(bundle: str, experts: bool, folder: str | None, device: str, as_json: bool, quiet: bool) -> None:
    """Check every checksum of BUNDLE, and with --experts its deltas; exit code 1 if a check fails."""
    with counting(quiet or as_json, "step") as progress:
        result = verify_bundle(bundle, experts=experts, folder=folder, device=device, progress=progress)
    if as_json:
        print_json(result.to_dict())
    elif not quiet:
        click.echo(describe(result))
    if not result.ok:
        sys.exit(1)


def describe(result: Verification) -> str:
    """A verification for the terminal."""
    if result.damage:
        faults = "\n".join(f"  {fault}" for fault in result.damage)
        return f"{result.path}: damaged\n{faults}\nMerge again, or copy the bundle again."
    parts = [f"{result.path}: all {result.files} files match the manifest"]
    if result.tasks:
        rows = [[t.task, t.expert, f"{t.error:.2e}", "off" if t.faults else "as expected"] for t in result.tasks]
        parts.append(table(["task", "expert", "relative error of the deltas", "verdict"], rows))
        worst = [[t.task, e.tensor, f"{e.error:.2e}", f"{e.promised:.2e}"] for t in result.tasks for e in t.worst[:3]]
        parts.append("worst tensors\n" + table(["task", "tensor", "error", "expected at its rank"], worst))
        parts += [f"{t.task}: {fault}" for t in result.tasks for fault in t.faults]
    return "\n\n".join(parts)
