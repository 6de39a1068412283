"""`mass pull`: a bundle of the hub, on this machine."""

from __future__ import annotations

import click

from massmerge.bundle.download import pull_bundle
from massmerge.bundle.manifest import read_manifest
from massmerge.cli.common import hub_bars, print_json, size, verb


@click.command()
@click.argument("repo")
@click.argument("folder", type=click.Path(file_okay=False), required=False)
@click.option("--overwrite", is_flag=True, help="Replace a bundle that is at FOLDER.")
@verb
def pull(repo: str, folder: str | None, overwrite: bool, as_json: bool, quiet: bool) -> None:
    """Download REPO (me/name, me/name@revision or an address) to FOLDER, or to a cache.

    Every checksum is compared. Run the same command again to resume a download that was interrupted.
    """
    hub_bars(shown=not (quiet or as_json))
    path = pull_bundle(repo, folder, overwrite=overwrite)
    files = read_manifest(path)["files"]
    total = sum(int(entry["bytes"]) for entry in files.values())
    if as_json:
        print_json({"repo": repo, "path": str(path), "files": len(files), "bytes": total})
    elif not quiet:
        click.echo(f"{path}: {size(total)}, all checksums match")
