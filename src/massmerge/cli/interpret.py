"""`mass interpret`: what a task's subspace means, as texts."""

from __future__ import annotations

import click

from massmerge.cli.common import counting, placement_options, print_json, table, verb


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.option(
    "--texts", type=click.Path(dir_okay=False), help="A file with one text per line; a built-in bank by default."
)
@click.option("--task", "tasks", multiple=True, help="A task to decode, all by default. May be repeated.")
@click.option("--site", "sites", multiple=True,
              help="A routing site, such as M5; by default at four fifths of the depth. May be repeated.")  # fmt: skip
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Texts per task and site.")
@click.option(
    "--clip", help="For image models: the CLIP model (folder or hub id) with text tower and visual projection."
)
@click.option(
    "--plot", type=click.Path(dir_okay=False), help="Plot the texts and their shares to this file (PNG, SVG, PDF)."
)
@placement_options
@verb
def interpret(
    bundle: str, texts: str | None, tasks: tuple[str, ...], sites: tuple[str, ...], top: int, clip: str | None,
    plot: str | None, device: str, dtype: str, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Decode the singular vectors of BUNDLE's tasks as texts (TextSpan), to see what each subspace means.

    Texts are ranked by how much a task's vectors vary along them; each text is projected out before the next is picked.
    """
    from massmerge.research.interpret.decoding import BANK, interpret

    with counting(quiet or as_json, "batch") as step:
        found = interpret(
            bundle,
            texts or BANK,
            tasks=list(tasks) or None,
            sites=list(sites) or None,
            top=top,
            clip=clip,
            plot=plot,
            device=device,
            dtype=dtype,
            progress=step,
        )
    if as_json:
        print_json([one.to_dict() for one in found])
        return
    for one in () if quiet else found:
        click.echo(click.style(f"\n{one.task} at {one.site}", bold=True))
        rows = [(t.text, f"{t.score:.3f}", f"{100 * t.share:.1f} %") for t in one.texts]
        click.echo(table(("text", "score", "share"), rows))
