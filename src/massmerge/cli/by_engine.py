"""Rows of a table answered by the workers of an engine, in the place of a model of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from massmerge.bundle.download import find_bundle
from massmerge.engines.choose import opened_engine
from massmerge.errors import InputError
from massmerge.io.addresses import is_address
from massmerge.io.remote_cache import staging_path
from massmerge.model.row_job import EngineModel

workers_option = click.option(
    "--workers", type=click.IntRange(min=1), help="With --engine: models that answer at the same time."
)


@contextmanager
def engine_model(
    bundle: str,
    engine: str,
    workers: int | None,
    out: str | None,
    *,
    loading: dict[str, Any],
    cache: str,
    seen: Callable[[int], object],
) -> Iterator[EngineModel]:
    """What answers in the place of a model, with a work folder beside the file of answers.

    Args:
        bundle: the bundle.
        engine: the engine, as `--engine` names it.
        workers: models that answer at the same time.
        out: the file of answers.
        loading: options of `load`.
        cache: the option of that name, which an engine does not have.
        seen: is told how many rows more are answered.

    Raises:
        InputError: an option does not go with an engine.
    """
    if out is None:
        raise InputError("--engine needs --out FILE: rows and answers pass through a folder beside it.")
    if cache != "0":
        raise InputError("--cache is of one process: leave it out, or --engine.")
    target = (staging_path(out) if is_address(out) else Path(out)).resolve()
    work = target.with_name(f".{target.name}.parts")
    with (
        opened_engine(engine, workers) as chosen,
        EngineModel.opened(find_bundle(bundle), chosen, work, loading=loading, seen=seen) as answering,
    ):
        yield answering
