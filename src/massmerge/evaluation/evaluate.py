"""Measures a bundle on a suite, in a way that cannot flatter: one shuffled stream, no task names."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from massmerge.bundle.download import find_bundle
from massmerge.engines.choose import opened_engine
from massmerge.engines.job import Engine
from massmerge.errors import InputError
from massmerge.evaluation.card import refuse_card, write_results
from massmerge.evaluation.experts import Experts, open_experts
from massmerge.evaluation.metrics import shared_groups
from massmerge.evaluation.predictions import is_right
from massmerge.evaluation.prepared import PreparedEvaluation, prepare_evaluation
from massmerge.evaluation.reliability import Reliability, reliability
from massmerge.evaluation.report import require_matplotlib
from massmerge.evaluation.results import BundleSizes, Evaluation, TaskResult, count_routes, count_sets
from massmerge.evaluation.row_table import RowTable
from massmerge.evaluation.run import Progress, RowAnswers, run_experts, run_known, run_once, run_stream, silent
from massmerge.evaluation.scoring import mean_figures, score_task
from massmerge.evaluation.suite import DEFAULT_SPLIT, Suite
from massmerge.evaluation.summary import write_evaluation
from massmerge.model.load import load
from massmerge.model.model import Model
from massmerge.model.row_job import EngineModel
from massmerge.model.speed import fast_at_once
from massmerge.model.static import StaticFolder, StaticModel
from massmerge.recipe import Unknown


def evaluate(
    bundle: str | Path | Model,
    suite: str | Path | Suite,
    *,
    tasks: Sequence[str] | None = None,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    router: str | None = None,
    route: Literal["input", "batch"] = "input",
    batch_size: int = 32,
    unknown: Unknown | dict[str, float] | None = None,
    cache: str | int = 0,
    engine: str | Engine | None = None,
    workers: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    oracle: bool = True,
    experts: bool = False,
    folder: str | Path | None = None,
    suite_folder: str | Path | None = None,
    report: str | Path | None = None,
    card: bool = False,
    progress: Progress = silent,
) -> Evaluation:
    """Measure a bundle, or a static merge, on the labelled data of a suite.

    The rows of all tasks are shuffled into one stream that carries no task names. An answer is correct if task and label
    both are. A row that cannot be read counts as wrong.

    Args:
        bundle: a bundle's folder, or a loaded model (then there are no sizes, and no experts); or what `merge` wrote with a
            static method, which routes nothing: the head with the largest logit answers.
        suite: a suite's path, or a `Suite`.
        tasks: measure these tasks of the suite only; inputs may still be routed to any task of the bundle.
        split: what `{split}` stands for in the suite's paths; `test` by default.
        limit: at most this many rows per task, drawn at random.
        seed: of that draw, of the stream and of the bootstrap.
        router: as in `load`.
        route: `input`, or `batch` for a stream of batches of one task each, with one decision for each batch.
        batch_size: inputs that run at once.
        unknown: when to abstain, instead of what the recipe says.
        cache: as in `load`.
        engine: answer rows with the workers of an engine, as in `merge`; by default in this process. If interrupted, run it
            again to resume.
        workers: with an engine, models that answer at the same time.
        device: where bundle and experts run, as in `load`.
        dtype: the type that they run in, as in `load`.
        oracle: also answer the same rows with the task given.
        experts: also measure each task's own expert on the same rows.
        folder: what the recipe's relative paths start from, with `experts`; the current folder by default.
        suite_folder: what the suite's relative paths start from; its own folder if a path is given.
        report: folder that gets tables, plots, figures and all answers; answers of experts are kept there.
        card: also put the results into the model card of the bundle, which must be a folder.
        progress: wraps iterables whose items take time.

    Raises:
        InputError: bundle and suite do not fit, or something is missing; nothing has been run then.
    """
    limits = unknown.model_dump() if isinstance(unknown, Unknown) else unknown
    loading = {"router": router, "cache": cache, "device": device, "dtype": dtype}
    _refuse_size(batch_size)
    ready = prepare_evaluation(bundle, suite, folder=suite_folder, tasks=tasks, split=split, limit=limit, seed=seed)
    if ready.writes and route == "batch":
        raise InputError("generative bundles route each prompt by itself: use route='input'.")
    if engine is not None:
        _refuse_engine(bundle, route, cache)
    _refuse_outputs(bundle, report, card=card)
    if ready.static is not None:
        _refuse_routing(ready.static, {"router": router, "unknown": unknown}, route, oracle=oracle)
    opened = _open_experts(ready, folder, device, dtype) if experts else None
    model = _open_model(bundle, ready, loading)
    for data in progress(ready.data.values(), "reading", len(ready.data)):
        data.read_inputs()
    with _measured(model, bundle, engine, workers, report, loading) as measured:
        rows, timings = run_stream(
            measured, ready, seed=seed, route=route, batch_size=batch_size, unknown=limits, progress=progress
        )
        if oracle:
            run_known(measured, ready, rows, batch_size=batch_size, progress=progress)
    if opened is not None:
        keep = None if report is None else Path(report) / "experts"
        run_experts(opened, ready, rows, batch_size=batch_size, keep=keep, progress=progress)
    once = opened is not None and _runs_once(model, ready, rows, batch_size, progress)
    chosen = {"split": split or DEFAULT_SPLIT, "limit": limit, "seed": seed, "route": route, "batch_size": batch_size}
    counted = {"unknown": limits, "oracle": oracle, "experts": experts, "one_pass": once}
    options = {**chosen, **_routing_of(model, ready, router), **counted, "shared_labels": ready.shared}
    name = str(bundle) if isinstance(bundle, str | Path) else "a loaded model"
    found = collect(ready, rows, timings, name=name, options=options)
    _write_outputs(found, bundle, report, card=card)
    return found


def _open_model(bundle: str | Path | Model, ready: PreparedEvaluation, loading: dict[str, Any]) -> Model | StaticModel:
    """The model that is measured; one that is loaded already, as it is."""
    with fast_at_once():
        if ready.static is not None:
            return StaticModel(ready.static.path, device=loading["device"], dtype=loading["dtype"])
        return load(bundle, check=True, **loading) if isinstance(bundle, str | Path) else bundle


def _routing_of(model: Model | StaticModel, ready: PreparedEvaluation, router: str | None) -> dict[str, Any]:
    """How inputs find their tasks, for the report."""
    routed = {"router": router or (ready.bundle.router_kind if ready.bundle else None)}
    return routed | ({"method": model.method} if isinstance(model, StaticModel) else {"voters": list(model.voters)})


def _refuse_outputs(bundle: str | Path | Model, report: str | Path | None, *, card: bool) -> None:
    """Refuse a report without the library of its plots, and a card where there is no folder."""
    if report is not None:
        require_matplotlib()
    if card:
        refuse_card(bundle)


def _write_outputs(found: Evaluation, bundle: str | Path | Model, report: str | Path | None, *, card: bool) -> None:
    """Write the report, and put the results into the model card, as far as they are wanted."""
    if report is not None:
        write_evaluation(found, Path(report))
    if card and isinstance(bundle, str | Path):
        write_results(Path(bundle), found)


def _refuse_size(batch_size: int) -> None:
    """Refuse batches without rows."""
    if batch_size < 1:
        raise InputError("batch_size must be at least 1.")


def _refuse_engine(bundle: object, route: str, cache: str | int) -> None:
    """Refuse what only one process can do; what a cache holds depends on what was asked before."""
    if cache not in (0, "0"):
        raise InputError("workers of an engine keep no cache: leave it out.")
    if route == "batch" or not isinstance(bundle, str | Path):
        raise InputError("an engine needs a bundle's folder, which its workers load, and route='input'.")


@contextmanager
def _measured(
    model: Model | StaticModel,
    bundle: str | Path | Model,
    engine: str | Engine | None,
    workers: int | None,
    report: str | Path | None,
    loading: dict[str, Any],
) -> Iterator[RowAnswers]:
    """What answers: the model, or an engine whose workers load it."""
    static, needs_task = isinstance(model, StaticModel), isinstance(model, StaticModel) and model.needs_task
    if engine is None or not isinstance(bundle, str | Path):
        yield RowAnswers(model, static, needs_task)
        return
    path = find_bundle(bundle).resolve()
    folder = path.with_name(f".{path.name}.eval") if report is None else Path(report) / "parts"
    with (
        opened_engine(engine, workers) as chosen,
        EngineModel.opened(path, chosen, folder, loading=loading, static=static) as answering,
    ):
        yield RowAnswers(answering, static, needs_task)


def _runs_once(
    model: Model | StaticModel, ready: PreparedEvaluation, rows: RowTable, size: int, progress: Progress
) -> bool:
    """Answer the rows by one pass, if the bundle can; returns whether it did."""
    if isinstance(model, StaticModel) or ready.writes or not model.answers_at_once:
        return False
    run_once(model, ready, rows, batch_size=size, progress=progress)
    return True


def _refuse_routing(static: StaticFolder, options: dict[str, object], route: str, *, oracle: bool) -> None:
    """Refuse what only a bundle can do."""
    asked = [name for name, value in options.items() if value] + (["route"] if route != "input" else [])
    if asked:
        raise InputError(
            f"{static.path}: merged by {static.method}, which does not route. Leave out {', '.join(asked)}, for "
            "bundles only."
        )
    if static.needs_task and not oracle:
        raise InputError(f"{static.path}: {static.method} needs the task. Measure it with the task given (--oracle).")


def _open_experts(ready: PreparedEvaluation, folder: str | Path | None, device: str, dtype: str) -> Experts:
    """The experts of the measured bundle, each of which answers its own task's rows."""
    if ready.static is not None:
        raise InputError(
            f"{ready.static.path}: experts are only measured with a bundle. `mass study methods` shows both in "
            "one table; or "
            "give each task a `reference` in the suite."
        )
    if ready.bundle is None:
        raise InputError("the experts of a loaded model are not known. Give the bundle's folder instead.")
    return open_experts(ready.bundle, Path(folder or "."), device, dtype)


def collect(
    ready: PreparedEvaluation,
    rows: RowTable,
    timings: dict[str, float],
    *,
    name: str,
    options: dict[str, Any],
) -> Evaluation:
    """The figures of a stream that has been run."""
    split = None if options["split"] == DEFAULT_SPLIT else options["split"]
    scored, groups = [], shared_groups(ready.shared)
    for number, (task, data) in enumerate(ready.data.items()):
        scored.append(
            score_task(
                data, ready.suite.tasks[task], rows.of_task(task), groups=groups, known=options["oracle"],
                expert=options["experts"], once=options.get("one_pass", False),
                reference=ready.suite.tasks[task].reference_of(split), seed=(options["seed"], number),
            )
        )  # fmt: skip
    results = tuple(one.result for one in scored)
    sizes = None
    if ready.bundle is not None:
        sizes = BundleSizes(ready.bundle.counted_bytes, ready.bundle.head_bytes, ready.bundle.base_bytes)
    elif ready.static is not None:
        sizes = BundleSizes(ready.static.nbytes, ready.static.head_bytes, ready.static.base_bytes)
    return Evaluation(
        ready.suite.name or "suite", name, options, results, mean_figures(scored),
        count_routes(rows, list(ready.data), ready.tasks), count_sets(rows), timings, sizes,
        (*ready.notes, *_static_notes(ready), *_notes(results, ready.suite, options)),
        datetime.now(UTC).isoformat(timespec="seconds"),
        rows, {task: data.names for task, data in ready.data.items()},
        None if ready.static else _reliability(rows, results, groups, writes=ready.writes),
    )  # fmt: skip


def _reliability(
    rows: RowTable, results: tuple[TaskResult, ...], groups: dict[str, int], *, writes: bool
) -> Reliability | None:
    """What the confidences of the answers are worth; those of texts speak of the task alone."""
    numbers = {result.task for result in results if result.metric == "spearman"}
    sure, right, tasks = array("d"), array("b"), array("q")  # for there may be millions
    places = {result.task: place for place, result in enumerate(results)}
    for row in rows:
        if row.confidence is not None and row.given.task and (writes or row.task not in numbers):
            sure.append(row.confidence)
            right.append(row.routed == row.task if writes else is_right(row, groups))
            tasks.append(places[row.task])
    if not sure:
        return None
    measured = [result.reference for result in results if result.metric == "accuracy" and result.reference]
    reference = sum(measured) / len(measured) if len(measured) == len(results) and not writes else None
    return reliability(sure, right, tasks, reference)


def _static_notes(ready: PreparedEvaluation) -> Iterator[str]:
    """What the figures of a static merge mean."""
    if ready.static is None:
        return
    method = ready.static.method
    if ready.static.needs_task:
        yield f"{method} keeps one model per task and needs the task: only the figures with the task given are its own."
    elif ready.writes:
        yield f"{method} generates one text per prompt and names no task: a text is correct whatever its task."
    else:
        yield f"{method} does not route: an input counts as routed to the task whose head has the largest logit."


def _notes(results: tuple[TaskResult, ...], suite: Suite, options: dict[str, Any]) -> Iterator[str]:
    """What a reader must know of the figures."""
    without = [result.task for result in results if result.reference is None]
    if without:
        which = "" if len(without) == len(results) else f" for {', '.join(without)}"
        yield (
            f"no reference{which}: normalised figures are left out. Measure the experts with --experts, or add "
            "`reference:` (the expert's own figure on these rows) to the tasks of the suite."
        )
        if options["split"] != DEFAULT_SPLIT and any(suite.tasks[task].reference is not None for task in without):
            yield (
                f"a single number as `reference` is for the split {DEFAULT_SPLIT!r}; for other splits write "
                f"`reference: {{{DEFAULT_SPLIT}: …, {options['split']}: …}}`."
            )
    drawn = [r.task for r in results if r.reference_source == "suite" and r.rows < r.total]
    if drawn:
        yield (
            f"references of {', '.join(drawn)} were measured on all rows, the figures on a sample: normalised "
            "figures are approximate. --experts measures the experts on the same rows."
        )
    useless = [result.task for result in results if result.reference is not None and result.reference <= 0]
    if useless:
        yield f"no normalised figures for {', '.join(useless)}: the reference is 0."
