"""`mass demo`: plan, merge, inspect and verify on an example that is made on the spot."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from massmerge.cli.common import print_json, verb
from massmerge.demo import make_example

_TEXTS = ("free prize, call now", "the team won the match")


@click.command()
@click.option(
    "--folder", type=click.Path(file_okay=False), help="Where to put the example; a new temporary folder by default."
)
@verb
def demo(folder: str | None, as_json: bool, quiet: bool) -> None:
    """Show what mass does, on a small base and three experts made on the spot (a few seconds)."""
    from massmerge.cli.explain import explain
    from massmerge.cli.inspect import inspect
    from massmerge.cli.merge import merge
    from massmerge.cli.plan import plan
    from massmerge.cli.predict import predict
    from massmerge.cli.verify import verify

    quiet = quiet or as_json
    place = Path(folder) if folder else Path(tempfile.mkdtemp(prefix="mass-demo-"))
    _say(quiet, f"Making a small BERT and three experts of it in {place}: two full fine-tunes and a LoRA adapter.")
    recipe = make_example(place)
    _say(quiet, recipe.read_text().rstrip())
    steps: tuple[tuple[click.Command, list[str], list[str]], ...] = (
        (plan, ["plan", "recipe.yaml"], [str(recipe)]),
        (merge, ["merge", "recipe.yaml", "out/"], [str(recipe), str(place / "out"), "--overwrite"]),
        (inspect, ["inspect", "out/"], [str(place / "out")]),
        (verify, ["verify", "out/", "--experts"], [str(place / "out"), "--experts", "--folder", str(place)]),
    )
    steps += (
        (predict, ["predict", "out/", *map(repr, _TEXTS)], [str(place / "out"), *_TEXTS]),
        (explain, ["explain", "out/", repr(_TEXTS[0])], [str(place / "out"), _TEXTS[0]]),
    )
    for command, shown, arguments in steps:
        _say(quiet, click.style(f"$ mass {' '.join(shown)}", fg="cyan", bold=True))
        command.main([*arguments, *["--quiet"] * quiet], standalone_mode=False)
    if as_json:
        print_json({"folder": str(place), "recipe": str(recipe), "bundle": str(place / "out")})
    _say(quiet, f"All of it is in {place}. Next: write a recipe with your own base and experts (docs/recipe.md).")


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        click.echo(f"\n{text}\n", err=True)
