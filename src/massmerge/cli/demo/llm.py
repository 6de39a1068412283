"""The demo on a language model: carried LoRA adapters of SmolLM2, merged into one bundle that chats."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from massmerge.cli.common import size
from massmerge.cli.demo.folder import Placed, open_folder, place
from massmerge.cli.demo.smollm import write_smollm
from massmerge.errors import InputError, MassError
from massmerge.merging.run import merge
from massmerge.model.load import load
from massmerge.model.model import Model

DATA = Path(__file__).parent / "llm_data"
_NEW_TOKENS = 16
_BAR = 24
# Written for the demo; they stand in no data set. The instructions are those that the adapters were trained with.
TURNS = (
    "Is this text message spam or ham? Answer with one word.\n\nWINNER!! You have been selected for a free "
    "holiday worth £1000. Text WIN to 87121 now",
    "Decide whether this film review is positive or negative.\n\nTwo hours of my life that I will never get back.",
    "What kind of thing does this definition describe?\n\na small burrowing animal with striped fur and a bushy tail",
    "Write a subject line for this message.\n\nI bought a second hand modem last week, and it drops the line after five "
    "minutes. Does anyone know which jumper sets the speed?",
)


def show_llm(folder: Path, *, quiet: bool) -> dict[str, Any]:
    """Fetch the base, merge the adapters, chat; returns where everything is, and who answered what.

    Raises:
        InputError: the base cannot be had, or the folder holds something else.
        MassError: the folder cannot be written.
    """
    began = time.perf_counter()

    def say(text: str) -> None:
        """Print what the demo does next."""
        if not quiet:
            click.echo(text)

    open_folder(folder, "llm")
    placed = _lay_out(folder)
    say(
        click.style(
            "One language model and many adapters become one bundle that finds the adapter by itself", bold=True
        )
    )
    say(f"\n   adapters {', '.join(path.name for path in sorted((folder / 'experts').iterdir()))}: rank 8, in {folder}")
    say("   base     SmolLM2-135M-Instruct: the first time a download, and a minute to unpack it")
    wrote = write_smollm(folder / "base")
    say(f"            {'written to' if wrote else 'found in'} {folder / 'base'}")
    _merge(folder, say)
    model = load(folder / "out")
    answers = [_chat(model, text, say) for text in TURNS]
    say(f"\nDone in {time.perf_counter() - began:.0f} s.\n\n{click.style('Next', bold=True)}, in {folder}")
    say('   $ mass generate out "Is this text message spam or ham? See you at eight" --chat')
    say("   $ mass serve out")
    return {
        "folder": str(folder), "bundle": str(folder / "out"), "written": placed.written, "answers": answers,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def _lay_out(folder: Path) -> Placed:
    placed = Placed()
    try:
        for path in sorted(p for p in DATA.rglob("*") if p.is_file()):
            name = path.relative_to(DATA)
            place(folder / name, path.read_bytes(), placed, name.parts[0] + "/" * (len(name.parts) > 1))
    except OSError as error:
        raise MassError(f"{error.filename or folder}: cannot be written ({error.strerror}).") from None
    return placed


def _merge(folder: Path, say: Any) -> None:
    say(f"\n{click.style('Merge: no training, no data.', bold=True)}\n   $ mass merge recipe.yaml out")
    try:
        merge(folder / "recipe.yaml", folder / "out")
    except InputError:
        if not (folder / "out").exists():
            raise
        merge(folder / "recipe.yaml", folder / "out", overwrite=True)  # the bundle of an earlier demo of other files
    say(f"   out: {size(sum(p.stat().st_size for p in (folder / 'out').rglob('*') if p.is_file()))}")


def _chat(model: Model, text: str, say: Any) -> dict[str, Any]:
    """One answer, with the adapter that gave it."""
    (answer,) = model.generate(messages=[{"role": "user", "content": text}], max_new_tokens=_NEW_TOKENS)
    assert answer.routing is not None
    say(f"\n{click.style('you', bold=True)}  " + text.replace("\n\n", "\n     "))
    say(f"{click.style(answer.task or 'none', fg='green', bold=True)}  {(answer.text or '').strip()}")
    weights = answer.routing.weights
    width = max(map(len, weights))
    for task in sorted(weights, key=lambda name: -weights[name]):
        say(f"     {task:{width}}  {weights[task]:.2f}  {'█' * round(_BAR * weights[task])}")
    return {"prompt": text, "task": answer.task, "text": answer.text}
