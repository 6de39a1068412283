"""`mass predict`: answers to inputs without a task name."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import click
from tqdm import tqdm

from massmerge.bundle.download import find_bundle
from massmerge.bundle.reader import Bundle
from massmerge.cli.common import (
    batch_size_option,
    cache_option,
    engine_option,
    named_answers,
    placement_options,
    plural,
    refuse_failures,
    refuse_unreadable,
    tasks_option,
    verb,
)
from massmerge.cli.writers import FORMATS, choose_format, open_writer
from massmerge.engines.choose import opened_engine
from massmerge.errors import InputError, MassError
from massmerge.io.addresses import is_address
from massmerge.io.remote_cache import staging_path
from massmerge.io.rows import TABLE_SUFFIXES, NamedInput, read_inputs
from massmerge.model.answers import Prediction
from massmerge.model.load import load
from massmerge.model.row_job import EngineModel
from massmerge.model.speed import fast_at_once

Stream = Callable[..., Iterator[Prediction]]


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.argument("inputs", nargs=-1, required=True)
@tasks_option
@click.option("--column", help="Column of a .csv, .jsonl or .parquet file that holds the inputs.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write the answers to this file (.jsonl, .csv, .parquet).")
@click.option("--format", "wanted", type=click.Choice(FORMATS), help="Format of the answers, if --out does not tell.")
@click.option("--top", type=click.IntRange(min=1), default=3, show_default=True, help="Answers per input.")
@click.option("--route", type=click.Choice(["input", "batch"]), default="input", show_default=True,
              help="Decide per input, or once per batch of inputs of one task.")  # fmt: skip
@click.option("--passes", type=click.IntRange(1, 2), default=2, show_default=True,
              help="1: heads on the base's own features, at about one forward pass.")  # fmt: skip
@click.option("--session", help="Column of the table whose rows with one value share evidence of their task.")
@batch_size_option
@cache_option
@engine_option
@click.option("--workers", type=click.IntRange(min=1), help="With --engine: models that answer at the same time.")
@placement_options
@click.option("--strict", is_flag=True, help="Stop at the first input that cannot be answered.")
@verb
def predict(
    bundle: str, inputs: tuple[str, ...], tasks: tuple[str, ...], column: str | None, out: str | None, wanted: str | None,
    top: int, route: str, passes: int, session: str | None, batch_size: int, cache: str, engine: str | None,
    workers: int | None, device: str, dtype: str, strict: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Answer INPUTS with BUNDLE: text, image files, folders, .txt, .csv, .jsonl, .parquet, or - for lines on standard input.

    Exit code 1 if an input could not be answered; the others still are. With --engine, rerun to resume if interrupted.
    """
    form = choose_format(wanted, out, as_json=as_json)
    if session and not any(Path(one).suffix.lower() in TABLE_SUFFIXES for one in inputs):
        raise InputError(f"--session {session}: names a column, and there is no table among the inputs.")
    options: dict[str, Any] = {"task": list(tasks) or None, "route": route, "top": top, "batch_size": batch_size}
    options["passes"] = passes
    read = partial(read_inputs, inputs, column=column, session=session, stdin=sys.stdin)
    bar = tqdm(unit="input", disable=quiet or form == "table" or None, leave=False, delay=1.0)
    with ExitStack() as stack:
        stack.enter_context(bar)
        if engine is None:
            with fast_at_once() if out else nullcontext():
                model = load(bundle, device=device, dtype=dtype, cache=cache, check=True)
            refuse_unreadable(model)
            rows, stream = read(image=model.takes_images), cast(Stream, model.stream)
            if session:
                keys: deque[str | None] = deque()
                rows, options["session"] = _noting(rows, keys), _taken(keys)
        else:
            _refuse_with_engine(out, session, cache)
            loading = {"device": device, "dtype": dtype}
            answering = stack.enter_context(_engine_model(bundle, engine, workers, str(out), loading, bar.update))
            rows, stream = read(image=Bundle(bundle, check=False).takes_images, decoded=False), answering.stream
        answers = named_answers(rows, partial(stream, on_error="row", **options))
        step = bar.update if engine is None else (lambda: None)
        count, failed = _write(answers, form, out, step, strict=strict, quiet=quiet)
    refuse_failures(failed, count, "input")
    if out and not quiet:
        click.echo(f"{plural(count, 'answer')} in {out}", err=True)


def _write(
    answers: Iterable[tuple[str, Prediction]],
    form: str,
    out: str | None,
    step: Callable[[], object],
    *,
    strict: bool,
    quiet: bool,
) -> tuple[int, int]:
    """Write answers as they come; how many there were, and how many of them are errors."""
    failed = count = 0
    with open_writer(form, out) as writer:
        for name, prediction in answers:
            count, failed = count + 1, failed + (prediction.error is not None)
            if prediction.error and strict:
                raise MassError(
                    prediction.error if prediction.error.startswith(name) else f"{name}: {prediction.error}"
                )
            if not (quiet and form == "table"):
                writer.write(name, prediction)
            step()
    return count, failed


def _refuse_with_engine(out: str | None, session: str | None, cache: str) -> None:
    if out is None:
        raise InputError("--engine needs --out FILE: rows and answers pass through a folder beside it.")
    if cache != "0":
        raise InputError("--cache is of one process: leave it out, or --engine.")
    if session:
        raise InputError("--session needs rows one after the other in one process: leave out --engine.")


@contextmanager
def _engine_model(
    bundle: str, engine: str, workers: int | None, out: str, loading: dict[str, Any], seen: Callable[[int], object]
) -> Iterator[EngineModel]:
    """What answers in the place of a model, with a work folder beside the file of answers."""
    target = (staging_path(out) if is_address(out) else Path(out)).resolve()
    work = target.with_name(f".{target.name}.parts")
    with (
        opened_engine(engine, workers) as chosen,
        EngineModel.opened(find_bundle(bundle), chosen, work, loading=loading, seen=seen) as answering,
    ):
        yield answering


def _noting(rows: Iterable[NamedInput], keys: deque[str | None]) -> Iterator[NamedInput]:
    """Rows as they are read, with the session of each put aside."""
    for row in rows:
        keys.append(row.session)
        yield row


def _taken(keys: deque[str | None]) -> Iterator[str | None]:
    """The sessions of the rows that have been read; each is taken right after its row."""
    while keys:
        yield keys.popleft()
