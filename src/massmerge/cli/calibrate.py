"""`mass calibrate`: fit a router on unlabelled inputs of each task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import click

from massmerge.bundle.download import refuse_hub
from massmerge.bundle.kept_inputs import tasks_kept
from massmerge.bundle.merge_folder import recover
from massmerge.bundle.reader import Bundle
from massmerge.cli.common import counting, placement_options, print_json, print_problems, table, verb
from massmerge.cli.merged import refuse_inside, run_shown
from massmerge.errors import InputError, Problem
from massmerge.io.remote_cache import path_of
from massmerge.io.rows import is_file_or_folder, read_inputs
from massmerge.linalg.intervals import Figure
from massmerge.model.calibrate import KINDS, MOST, Calibration
from massmerge.model.calibrate import calibrate as fit
from massmerge.model.limits import GIVEN_UP, Limits
from massmerge.routing.tuned import TUNED


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.option("--inputs", multiple=True, required=True, metavar="TASK=PATH",
              help="Inputs of a task: a .txt file, a folder, a table. Repeat for each task.")  # fmt: skip
@click.option("--column", help="Column of a table that holds the inputs.")
@click.option("--kind", type=click.Choice(KINDS), default="auto", show_default=True,
              help="The router; auto chooses prototype or linear by cross-validation.")  # fmt: skip
@click.option("--count", type=click.IntRange(min=1), default=MOST, show_default=True, help="Inputs per task at most.")
@click.option("--precision", type=click.FloatRange(0, 1, min_open=True, max_open=True),
              help="Propose the least confidence with which this share of answers is right.")  # fmt: skip
@click.option("--write-limits", is_flag=True, help="Write the proposed limits into the bundle, which then abstains.")
@placement_options
@verb
def calibrate(
    bundle: str,
    inputs: tuple[str, ...],
    column: str | None,
    kind: str,
    count: int,
    precision: float | None,
    write_limits: bool,
    device: str,
    dtype: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Fit a router of BUNDLE on inputs of each task, a dozen or thousands; labels are not needed.

    The bundle uses this router from then on. The routing accuracy to expect is estimated by cross-validation.
    """
    refuse_hub(bundle)
    refuse_inside(bundle)
    recover(Path(bundle))
    image = Bundle(bundle, check=False).takes_images
    rows = task_inputs(inputs, image=image, column=column)
    with counting(quiet or as_json, "step") as step:
        done = fit(
            bundle, rows, kind=kind, count=count, precision=precision, write_limits=write_limits, device=device,
            dtype=dtype, progress=step,
        )  # fmt: skip
    if as_json:
        print_json(done.plain())
    elif not quiet:
        show_calibration(bundle, done)


def task_inputs(entries: Iterable[str], *, image: bool, column: str | None) -> dict[str, Iterator[object]]:
    """The inputs of each task, of an option that is given once a task or more often."""
    found: dict[str, Iterator[object]] = {}
    for entry in entries:
        task, path = task_and_path(entry)
        own = (good(row.item) for row in read_inputs([path], image=image, column=column))
        found[task] = chain(found.get(task, ()), own)
    return found


def calibrate_by_recipe(
    out: str, folder: Path, *, quiet: bool, kind: str = "auto", device: str = "auto", dtype: str = "auto"
) -> Calibration | None:
    """Fit a router on the inputs that a bundle's recipe names, and on what it keeps of those of an earlier calibration.

    None if there is neither of a task, or if a router is fitted already.

    Args:
        out: the bundle.
        folder: what relative paths of the recipe start from.
        quiet: show no progress.
        kind: of the router.
        device: where to run.
        dtype: the type to run in.
    """
    found = Bundle(out, check=False)
    tasks = found.recipe.tasks
    paths = {task.name: path_of(task.inputs, folder) for task in tasks if task.inputs is not None}
    there = {name: path for name, path in paths.items() if path.exists()}
    kept = {task.name for task in tasks[: tasks_kept(found)]}
    if len(tasks) < 2 or len(there.keys() | kept) < len(tasks) or "router_kind" in found.manifest:
        return None
    image = found.takes_images
    rows = {
        task.name: (good(r.item) for r in read_inputs([str(there[task.name])], image=image, column=task.column))
        for task in tasks
        if task.name in there
    }
    try:
        with counting(quiet, "step") as step:
            return fit(out, rows, kind=kind, device=device, dtype=dtype, progress=step)
    except InputError as error:
        if not kept:
            raise
        # The bundle is written and answers; only the router of before could not be fitted again.
        print_problems([Problem("router", f"not fitted again: {error} See `mass calibrate`.", "warning")])
        return None


def run_and_fit(
    work: Callable[..., Path], bundle: str, out: str, folder: Path, *, quiet: bool, device: str, dtype: str
) -> tuple[dict[str, object], Calibration | None]:
    """Run a change of a bundle's tasks and fit its router again; what was written, and the fit if there are inputs."""
    kind = _kind_again(bundle)
    summary = run_shown(work, quiet=quiet)
    done = calibrate_by_recipe(out, folder, quiet=quiet, kind=kind, device=device, dtype=dtype)
    return (summary if done is None else {**summary, "calibration": done.plain()}), done


def show_calibration(bundle: str, done: Calibration) -> None:
    """What was fitted, what to expect and what to do next."""
    total = ", ".join(f"{task} {number}" for task, number in done.inputs.items())
    click.echo(f"{bundle}: now routes by {done.kind}, fitted on {total} inputs")
    after = done.after
    if after is not None:
        rows = [["all", _percent(done.before.mean), _percent(after.mean)]]
        rows += [[task, _percent(done.before.tasks[task]), _percent(after.tasks[task])] for task in done.inputs]
        click.echo("\nexpected routing accuracy in %, with its 95 % interval")
        click.echo(table(["task", "without calibration", f"with {done.kind}"], rows))
        for pair in after.confused:
            click.echo(f"{100 * pair.share:.0f} % of {pair.task} goes to {pair.other}")
    if done.replayed:
        click.echo(
            f"of {', '.join(done.replayed)} the bundle keeps means and scatter of earlier inputs; figures are of those"
        )
    for sentence in done.advice:
        click.echo(sentence)
    for sentence in _limits_in_words(done.limits):
        click.echo(sentence)
    size = done.size
    if size is not None and size.dropped:
        click.echo(
            f"{100 * size.dropped:.1f} % of the singular vectors made room for the router: {size.ratio:.3f} × the base"
        )
    elif size is not None and size.budget is not None and size.ratio > size.budget:
        click.echo(
            f"with the router the bundle is {size.ratio:.3f} × the base, more than its budget of {size.budget:g}"
        )


def _limits_in_words(limits: Limits) -> Iterator[str]:
    """The limits that are proposed, and what they do."""
    if limits.typicality is not None:
        yield (
            f"limit for inputs of no task: typicality {limits.typicality:.4f} "
            f"(gives up {100 * GIVEN_UP:.0f} % of the tasks' own inputs)"
        )
    if limits.confidence is not None and limits.precision is not None and limits.answered is not None:
        yield (
            f"limit for {100 * limits.precision:g} % right answers: confidence {limits.confidence:.4f} "
            f"(answers {100 * limits.answered:.0f} % of inputs)"
        )
    elif limits.precision is not None:
        yield f"no limit of confidence reaches {100 * limits.precision:g} % right answers on these inputs"


def _kind_again(bundle: str) -> str:
    """The kind of router to fit again when a bundle's tasks have changed; a trained one needs all its inputs."""
    kind = Bundle(bundle, check=False).manifest.get("router_kind", "auto")
    return "auto" if kind == TUNED else str(kind)


def paths_of(inputs: tuple[str, ...]) -> dict[str, str]:
    """The file or folder of each task's inputs, of an option that is given once a task."""
    return dict(task_and_path(entry) for entry in inputs)


def _percent(figure: Figure) -> str:
    return f"{100 * figure.value:.1f} ({100 * figure.low:.1f} to {100 * figure.high:.1f})"


def task_and_path(entry: str) -> tuple[str, str]:
    """A task and the file or folder of its inputs; a text in their place is refused, for it would be a path mistyped."""
    task, equals, path = entry.partition("=")
    if not equals:
        raise InputError(f"{entry!r}: write --inputs task=path.")
    if not path:
        raise InputError(f"{entry!r}: the path is missing; write --inputs task=path.")
    if not is_file_or_folder(path):
        raise InputError(f"inputs of {task}: {path}: no such file or folder.")
    return task, path


def good(item: object) -> object:
    """An input, if it could be read."""
    if isinstance(item, InputError):
        raise item
    return item
