"""The tiny demo: plan, merge, inspect and verify on an example that is made on the spot."""

from __future__ import annotations

from pathlib import Path

import click

from massmerge.cli.demo.example import make_example, make_writing_example
from massmerge.cli.demo.folder import open_folder

_TEXTS = ("free prize, call now", "the team won the match")
_SHORT = ("--max-new-tokens", "8")


def show_tiny(place: Path, *, writes: bool, quiet: bool) -> dict[str, str]:
    """Make the example in a folder, or the one that writes, and run the verbs on it; returns where everything is."""
    from massmerge.cli.explain import explain
    from massmerge.cli.generate import generate
    from massmerge.cli.inspect import inspect
    from massmerge.cli.merge import merge
    from massmerge.cli.plan import plan
    from massmerge.cli.predict import predict
    from massmerge.cli.verify import verify

    open_folder(place, "tiny")
    made = "T5 and two full experts of it" if writes else "BERT and three experts of it"
    what = "" if writes else ": two full fine-tunes and a LoRA adapter"
    _say(quiet, f"Making a small {made} in {place}{what}.")
    recipe = (make_writing_example if writes else make_example)(place)
    _say(quiet, recipe.read_text(encoding="utf-8").rstrip())
    steps: tuple[tuple[click.Command, list[str], list[str]], ...] = (
        (plan, ["plan", "recipe.yaml"], [str(recipe)]),
        (merge, ["merge", "recipe.yaml", "out/"], [str(recipe), str(place / "out"), "--overwrite"]),
        (inspect, ["inspect", "out/"], [str(place / "out")]),
        (verify, ["verify", "out/", "--experts"], [str(place / "out"), "--experts", "--folder", str(place)]),
    )
    steps += (
        ((generate, ["generate", "out/", *map(repr, _TEXTS), *_SHORT], [str(place / "out"), *_TEXTS, *_SHORT]),)
        if writes
        else (
            (predict, ["predict", "out/", *map(repr, _TEXTS)], [str(place / "out"), *_TEXTS]),
            (explain, ["explain", "out/", repr(_TEXTS[0])], [str(place / "out"), _TEXTS[0]]),
        )
    )
    for command, shown, arguments in steps:
        _say(quiet, click.style(f"$ mass {' '.join(shown)}", fg="cyan", bold=True))
        command.main([*arguments, *["--quiet"] * quiet], standalone_mode=False)
    _say(quiet, f"Everything is in {place}. Next: write a recipe with your own base and experts (docs/recipe.md).")
    return {"folder": str(place), "recipe": str(recipe), "bundle": str(place / "out")}


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        click.echo(f"\n{text}\n", err=True)
