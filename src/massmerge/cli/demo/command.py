"""`mass demo`: from experts to answers in a minute, on real ones."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click

from massmerge.cli.common import print_json, verb
from massmerge.cli.demo.tiny import show_tiny
from massmerge.cli.demo.tour import Tour
from massmerge.errors import InputError


@click.command()
@click.option("--folder", type=click.Path(file_okay=False),
              help="Folder to write to; ./mass-demo by default, a temporary folder with --tiny.")  # fmt: skip
@click.option("--vision", is_flag=True, help="Use the experts of the vision suite (make suite-vision).")
@click.option("--llm", is_flag=True, help="Chat with SmolLM2-135M and four adapters that come with mass.")
@click.option("--tiny", is_flag=True, help="Use a tiny base and three experts with random weights instead.")
@click.option("--generate", "writes", is_flag=True, help="With --tiny: a T5 and two generative experts.")
@verb
def demo(folder: str | None, vision: bool, llm: bool, tiny: bool, writes: bool, as_json: bool, quiet: bool) -> None:
    """Show what mass does: merge real experts, evaluate the bundle, explain answers (a minute).

    Five experts of one small text model come with mass. Everything stays in the folder for you to try.
    """
    if vision + llm + tiny > 1:
        raise InputError("--vision, --llm and --tiny are different demos. Choose one.")
    if writes and not tiny:
        raise InputError("--generate needs --tiny; --llm shows generative experts that mass comes with.")
    began = time.perf_counter()
    if tiny:
        place = Path(folder) if folder else Path(tempfile.mkdtemp(prefix="mass-demo-"))
        found: dict[str, Any] = show_tiny(place, writes=writes, quiet=quiet or as_json)
    elif llm:
        from massmerge.cli.demo.llm import show_llm

        found = show_llm(Path(folder or "mass-demo-llm"), quiet=quiet or as_json)
    else:
        # The libraries behind these take seconds to load, which the other verbs should not pay for.
        from massmerge.cli.demo.text import make_text_demo
        from massmerge.cli.demo.vision import make_vision_demo

        place = Path(folder or ("mass-demo-vision" if vision else "mass-demo"))
        tour = Tour((make_vision_demo if vision else make_text_demo)(place), quiet=quiet or as_json)
        found = tour.run(began)
    if as_json:
        print_json(found)
