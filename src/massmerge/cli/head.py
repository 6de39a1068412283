"""`mass head`: a head made of texts, as a file."""

from __future__ import annotations

from pathlib import Path

import click

from massmerge.checkpoints import find_source, open_base
from massmerge.cli.common import plural, print_json, verb
from massmerge.errors import InputError
from massmerge.io.durable import drafted
from massmerge.io.tensor_file import write_tensors
from massmerge.merging.heads.labels import repeated
from massmerge.merging.heads.text import TextTower, read_texts, text_head
from massmerge.recipe import TextHead


@click.command()
@click.argument("base")
@click.argument("classes", type=click.Path(dir_okay=False))
@click.argument("out", type=click.Path(dir_okay=False))
@click.option(
    "--template", "templates", multiple=True, help="A sentence with {} for the class; once or more. Instead of --set."
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
    """Make a head of the class names in the file CLASSES by the text tower of BASE, and write it to OUT.

    BASE is a whole CLIP or SigLIP: folder, hub id, or a state dict of open_clip. OUT is a .safetensors file that a recipe
    names as `head: {weights: OUT, labels: CLASSES, normalize: true}`.
    """
    if Path(out).suffix != ".safetensors":
        raise InputError(f"{out}: a head is a .safetensors file; give it that ending.")
    here = Path()
    names, used = read_texts(TextHead(classes=classes, templates=list(templates) or named), here)
    if twice := repeated(names):
        raise InputError(f"{classes}: has {twice} more than once. Give each class its own name.")
    opened = open_base(find_source(base, here, download=True))
    source = opened.source if tokenizer is None else find_source(tokenizer, here, download=True)
    tower = TextTower(opened, source)
    tensors = text_head(tower, names, used)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with drafted(Path(out)) as draft:
        write_tensors(draft, tensors)
    if as_json:
        shape = list(tensors["weight"].shape)
        print_json({"path": out, "classes": len(names), "templates": len(used), "shape": shape, "scale": tower.scale})
    elif not quiet:
        words = f"{len(names)} classes" if len(names) != 1 else "1 class"
        click.echo(f"{out}: {words}, {plural(len(used), 'template')}, {tower.width} wide, scale {tower.scale:.1f}")
        click.echo(f"head: {{weights: {out}, labels: {classes}, normalize: true}}")
