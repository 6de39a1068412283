"""`mass generate`: texts in answer to prompts without a task name."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import click
from tqdm import tqdm

from massmerge.cli.common import cache_option, named_answers, refuse_failures, refuse_unreadable, tasks_option, verb
from massmerge.errors import InputError
from massmerge.io.rows import NamedInput, read_inputs
from massmerge.model.answers import Generation
from massmerge.model.load import load
from massmerge.model.model import Model


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.argument("prompts", nargs=-1, required=True)
@tasks_option
@click.option("--column", help="Column of a .csv, .jsonl or .parquet file that holds the prompts.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Most tokens of a text; 64 by default.")
@click.option("--option", "given", multiple=True, metavar="NAME=VALUE",
              help="An option of transformers' generate, such as num_beams=4. May be repeated.")  # fmt: skip
@click.option("--stream", is_flag=True, help="Print the text to one prompt while it is written.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Prompts that run at once."
)
@cache_option
@verb
def generate(
    bundle: str, prompts: tuple[str, ...], tasks: tuple[str, ...], column: str | None, max_new_tokens: int | None,
    given: tuple[str, ...], stream: bool, batch_size: int, cache: str, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Write answers to PROMPTS with BUNDLE: text, files, folders, .csv, .jsonl, .parquet, or - for lines on standard input.

    The bundle's base must be an encoder-decoder such as T5, or a decoder such as Llama.

    Exit code 1 if a prompt could not be answered; the others are answered all the same.
    """
    options: dict[str, Any] = {"task": list(tasks) or None, **_options(given)}
    if max_new_tokens is not None:
        options["max_new_tokens"] = max_new_tokens
    if stream and as_json:
        raise InputError("--stream prints pieces of a text, --json a whole answer. Choose one.")
    model = load(bundle, cache=cache, check=True)
    refuse_unreadable(model)
    rows = read_inputs(prompts, image=model.takes_images, column=column, stdin=sys.stdin)
    if stream:
        _stream(model, list(rows), options)
        return
    failed = count = 0
    with tqdm(unit="prompt", disable=quiet or not as_json or None, leave=False, delay=1.0) as bar:
        write = partial(model.generate_many, on_error="row", batch_size=batch_size, **options)
        for name, generation in named_answers(rows, write):
            count, failed = count + 1, failed + (generation.error is not None)
            if as_json:
                click.echo(json.dumps({"input": name, **generation.to_dict()}, ensure_ascii=False))
            elif not quiet or generation.error:
                _print(name, generation, header=count == 1)
            bar.update()
    refuse_failures(failed, count, "prompt")


def _options(given: tuple[str, ...]) -> dict[str, Any]:
    """Options written as NAME=VALUE; values are JSON where they can be, else text."""
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"--option {text!r}: write NAME=VALUE, such as num_beams=4.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = {"true": True, "false": False}.get(value.lower(), value)
    reserved = [name for name in options if name in ("task", "batch_size", "unknown", "on_error")]
    if reserved:
        raise InputError(f"--option {', '.join(reserved)}: not an option of generate. `mass generate -h` lists ours.")
    return options


def _stream(model: Model, rows: list[NamedInput], options: dict[str, Any]) -> None:
    """Print one text as it comes."""
    if len(rows) != 1:
        raise InputError(f"--stream is for one prompt; there are {len(rows)}.")
    if isinstance(rows[0].item, InputError):
        raise rows[0].item
    text = model.generate_stream(rows[0].item, **options)
    click.echo(click.style(f"{text.task or 'unknown'}: ", bold=True), err=True)
    for piece in text:
        click.echo(piece, nl=False)
    click.echo()


def _print(name: str, generation: Generation, *, header: bool) -> None:
    """One line for people; a text of several lines is shown as one."""
    if header:
        click.echo(click.style(f"{'task':<16} {'weight':>6}  {'text':<40}  input", bold=True))
    if generation.error:
        where = "" if generation.error.startswith(name) else f"{name}: "
        click.echo(f"{click.style('error'.ljust(16), fg='red')} {where}{generation.error}")
        return
    task = f"{generation.task:<16}" if generation.task else click.style(f"{'unknown':<16}", fg="yellow")
    weights = generation.routing.weights if generation.routing else {}
    weight = f"{weights[generation.task]:.3f}" if generation.task in weights else ""
    click.echo(f"{task} {weight:>6}  {' '.join((generation.text or '').split()):<40}  {name}")
