"""The tiny demo: plan, merge, inspect and verify on an example that is made on the spot."""

from __future__ import annotations

from pathlib import Path

import click

from massmerge.demo.folder import open_folder
from massmerge.example import make_example

_TEXTS = ("free prize, call now", "the team won the match")


def show_tiny(place: Path, *, quiet: bool) -> dict[str, str]:
    """Make the example in a folder and run the verbs on it; returns where everything is."""
    from massmerge.cli.explain import explain
    from massmerge.cli.inspect import inspect
    from massmerge.cli.merge import merge
    from massmerge.cli.plan import plan
    from massmerge.cli.predict import predict
    from massmerge.cli.verify import verify

    open_folder(place, "tiny")
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
    _say(quiet, f"All of it is in {place}. Next: write a recipe with your own base and experts (docs/recipe.md).")
    return {"folder": str(place), "recipe": str(recipe), "bundle": str(place / "out")}


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        click.echo(f"\n{text}\n", err=True)
