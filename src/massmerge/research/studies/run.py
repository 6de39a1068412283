"""Runs studies by name and writes what they find: a folder each, and one report of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from massmerge.engines.choose import opened_engine
from massmerge.engines.job import Engine
from massmerge.errors import InputError
from massmerge.evaluation.run import Progress, silent
from massmerge.evaluation.suite import DEFAULT_SPLIT
from massmerge.research.peers.options import parse_options
from massmerge.research.studies import STUDIES
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.opening import open_studies
from massmerge.research.studies.overview import write_overview
from massmerge.research.studies.result import Result, duration, machine, versions, write_result
from massmerge.research.studies.search import require_optuna
from massmerge.research.studies.settings import StudySettings
from massmerge.research.studies.study import Study
from massmerge.research.studies.sweep import SWEEP

ALL = "all"


def study(
    name: str,
    suite: str | Path,
    *,
    bundle: str | Path | None = None,
    recipe: str | Path | None = None,
    out: str | Path = "study",
    split: str | None = None,
    limit: int | None = None,
    quick: bool = False,
    seed: int = 0,
    batch_size: int = 32,
    device: str = "auto",
    dtype: str = "auto",
    engine: str | Engine | None = None,
    workers: int | None = None,
    search: bool = False,
    trials: int = 40,
    peers: Iterable[str] = (),
    command: str = "",
    progress: Progress = silent,
    tell: Callable[[str], None] = lambda sentence: None,
) -> list[Result]:
    """Run one of the paper's studies, or all of them, and write their reports.

    An interrupted study resumes when it is run again: finished steps are taken from the `cache` of its folder.

    Args:
        name: of the study, or `all`; `mass study --list` shows the names.
        suite: the suite's path.
        bundle: the bundle to study; if there is none, the recipe is merged.
        recipe: the recipe with the experts, which some studies need.
        out: each study writes to a folder of its name in this one.
        split: what `{split}` stands for in the suite's paths; `test` by default.
        limit: at most this many rows per task, drawn at random.
        quick: at most 20 rows per task unless `limit` says how many, and coarse grids.
        seed: for the draw of rows and everything else that is random.
        batch_size: inputs per batch.
        device: where everything runs, as in `load`.
        dtype: the type that models run in, as in `load`.
        engine: merge, and answer rows by the sets that a study selects, with the workers of an engine, as in `merge`; by
            default in this process.
        workers: with an engine, models that answer at the same time.
        search: for `sweep`, also search η, K, ε and the site on the validation split.
        trials: for `search`, how many settings to try.
        peers: options of routed peers, such as `smile_1.rank=16`, for `methods`, `oracle` and `storage`.
        command: the command line, for the report.
        progress: wraps iterables whose items take time.
        tell: called with a sentence on what is being done.

    Returns:
        One result per study that was run.

    Raises:
        InputError: unknown study or option, or suite, bundle and recipe do not match; nothing has been computed.
    """
    options: dict[str, Any] = {"search": True, "trials": trials} if search else {}
    if given := parse_options(peers):
        options["peers"] = given
    settings = StudySettings(split, limit, seed, quick, batch_size, device, dtype, options)
    refuse_engine(name, engine, workers)
    with nullcontext(None) if engine is None else opened_engine(engine, workers) as chosen:
        return run_studies(
            name, suite, out, bundle=bundle, recipe=recipe, settings=settings, engine=chosen, command=command,
            progress=progress, tell=tell,
        )  # fmt: skip


def refuse_engine(name: str, engine: object, workers: int | None) -> None:
    """Refuse an engine for a study whose rows it cannot answer; of `all`, such studies run in this process."""
    if engine is None and workers is not None:
        raise InputError("--workers counts the workers of an engine: give --engine, or leave it out.")
    if engine is not None and name in STUDIES and STUDIES[name].here:
        can = [study.name for study in STUDIES.values() if not study.here]
        raise InputError(
            f"study {name}: {STUDIES[name].here} Leave out --engine; the studies that it serves are {', '.join(can)}."
        )


def run_studies(
    name: str,
    suite: str | Path,
    out: str | Path = "study",
    *,
    bundle: str | Path | None = None,
    recipe: str | Path | None = None,
    settings: StudySettings | None = None,
    engine: Engine | None = None,
    command: str = "",
    progress: Progress = silent,
    tell: Callable[[str], None] = lambda sentence: None,
) -> list[Result]:
    """Run a study, or all of them, and write their folders.

    An interrupted run resumes: the same call again takes what is finished from the folder's `cache`.

    Args:
        name: of the study, or `all`.
        suite: the suite's path.
        out: each study writes to a folder of its name in this one.
        bundle: the bundle to study; without it the recipe's is merged.
        recipe: the recipe with the experts, which some studies read.
        settings: split, limit, seed and the like.
        engine: whose workers merge, and answer by sets.
        command: the command line, to be written beside the figures.
        progress: wraps iterables whose items take time.
        tell: called with a sentence on what is being done.

    Raises:
        InputError: unknown study, or suite, bundle and recipe do not fit; nothing has been computed then.
    """
    if name != ALL and name not in STUDIES:
        raise InputError(f"no study {name!r}. Choose from {', '.join(STUDIES)}, and {ALL}.")
    settings, folder = settings or StudySettings(), Path(out)
    wanted = _with_options(list(STUDIES.values()) if name == ALL else [STUDIES[name]], settings)
    opened = open_studies(
        wanted, suite, folder, settings, bundle=bundle, recipe=recipe, engine=engine, progress=progress, tell=tell,
    )  # fmt: skip
    about = _about(opened.context, command)
    results = []
    for study in opened.studies:
        results.append(_run_one(study, opened.context, about))
        write_result(results[-1], folder / study.name)
    if name == ALL:
        write_overview(results, opened.left_out, folder)
    return results


def _with_options(studies: list[Study], settings: StudySettings) -> list[Study]:
    """The studies as the options want them, or an error if none of them knows an option."""
    for peer in settings.options.get("peers", {}):
        if not any(peer in study.peers for study in studies):
            knowing = [study.name for study in STUDIES.values() if peer in study.peers]
            raise InputError(f"--peer {peer}: belongs to the studies {', '.join(knowing)}.")
    if settings.options.get("search"):
        if SWEEP not in studies:
            raise InputError(f"--search belongs to the study {SWEEP.name}.")
        require_optuna()
        studies = [replace(study, needs_validation=True) if study == SWEEP else study for study in studies]
    return [study.as_asked(quick=settings.quick) for study in studies]


def _run_one(study: Study, context: StudyContext, about: dict[str, Any]) -> Result:
    expected = study.seconds(context)
    context.tell(f"{study.name}: {len(context.samples):,} rows, at most about {duration(expected)}")
    began = time.perf_counter()
    found = study.run(context)
    notes = [f"{name}: {_words(given)}." for name in study.peers if (given := context.settings.peer(name))]
    return Result(study, replace(found, notes=[*found.notes, *notes]), about, time.perf_counter() - began)


def _words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _about(context: StudyContext, command: str) -> dict[str, Any]:
    settings = context.settings
    return {
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "suite": context.ready.suite.name,
        "bundle": str(context.bundle),
        "settings": {**vars(settings), "split": settings.split or DEFAULT_SPLIT, "options": dict(settings.options)},
        "data": {
            task: {"where": data.where, "rows": len(data), "total": data.total, "sha256": data.sha256()}
            for task, data in context.ready.data.items()
        },
    }
