"""`mass push`: a bundle for the hub."""

from __future__ import annotations

import click

from massmerge.bundle.upload import Push, push_bundle
from massmerge.cli.common import hub_bars, plural, print_json, size, verb


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.argument("repo")
@click.option("--private", is_flag=True, help="Create a private repository; one that exists stays as it is.")
@click.option("--revision", default="main", show_default=True, help="Branch to commit to; created if there is none.")
@click.option("--message", help="Message of the commit.")
@click.option("--dry-run", is_flag=True, help="Check the bundle, show what would be sent, and send nothing.")
@verb
def push(
    bundle: str, repo: str, private: bool, revision: str, message: str | None, dry_run: bool, as_json: bool, quiet: bool
) -> None:
    """Upload BUNDLE to the hub as REPO (me/name), or to an address such as s3://bucket/name.

    One commit holds all of it. Run the same command again to resume an upload that was interrupted. Needs a token that may
    write: `hf auth login`, or HF_TOKEN.
    """
    hub_bars(shown=not (quiet or as_json))
    done = push_bundle(bundle, repo, private=private, revision=revision, message=message, dry_run=dry_run)
    if done.local_paths:
        mark = click.style("warning", fg="yellow", bold=True)
        shown = ", ".join(done.local_paths[:3])
        click.echo(f"{mark}: the bundle names paths of this machine, which others will read: {shown}", err=True)
    if as_json:
        print_json(done.to_dict())
    elif not quiet:
        click.echo(describe(done))


def describe(done: Push) -> str:
    """A push for the terminal."""
    what = f"{plural(done.files, 'file')}, {size(done.bytes)}"
    if done.sent and done.commit is None:
        return f"{done.repo}: {what}\nNext: `mass predict {done.repo} INPUT…`"
    if done.commit is None:
        return f"would send to {done.repo}, branch {done.revision}: {what}"
    gone = f"; {plural(len(done.removed), 'file')} of the bundle before removed" if done.removed else ""
    name = done.repo if done.revision == "main" else f"{done.repo}@{done.revision}"
    return f'{done.repo}: {what}{gone}\n{done.url}\nNext: mm.load("{name}"), or `mass predict {name} INPUT…`'
