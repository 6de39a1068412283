"""`mass head`: a head made of texts, as a file."""

from __future__ import annotations

import click

from massmerge.cli.common import plural, print_json, verb
from massmerge.merging.heads.make import make_head


@click.command()
@click.argument("base")
@click.argument("classes", type=click.Path(dir_okay=False))
@click.argument("out", type=click.Path(dir_okay=False))
@click.option(
    "--template",
    "templates",
    multiple=True,
    help="A sentence with {} for the class, instead of --set. May be repeated.",
)
@click.option("--set", "named", default="photo", show_default=True, help="A named set of templates, or a file.")
@click.option("--tokenizer", help="Folder or hub id of the tokenizer, if not the base's.")
@verb
def head(
    base: str,
    classes: str,
    out: str,
    templates: tuple[str, ...],
    named: str,
    tokenizer: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make a head for the class names in the file CLASSES with the text tower of BASE, and write it to OUT.

    BASE is a whole CLIP or SigLIP model: folder, hub id, or a state dict of open_clip. OUT is a .safetensors file that a
    recipe names as `head: {weights: OUT, labels: CLASSES, normalize: true}`.
    """
    written = make_head(base, classes, out, templates=list(templates) or named, tokenizer=tokenizer)
    if as_json:
        print_json(written.to_dict())
    elif not quiet:
        words = f"{written.classes} classes" if written.classes != 1 else "1 class"
        used, width = plural(written.templates, "template"), written.shape[1]
        click.echo(f"{out}: {words}, {used}, {width} wide, scale {written.scale:.1f}")
        click.echo(f"head: {{weights: {out}, labels: {classes}, normalize: true}}")
