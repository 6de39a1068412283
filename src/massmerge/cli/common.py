"""What the verbs share: exit codes, tables, sizes, the progress bar, the flags that each has."""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from tqdm import tqdm

from massmerge.errors import InputError, MassError, Problem
from massmerge.io.dtypes import DTYPES

if TYPE_CHECKING:
    from massmerge.io.rows import NamedInput
    from massmerge.model.model import Model

_F = TypeVar("_F", bound=Callable[..., Any])
_A = TypeVar("_A")


tasks_option = click.option(
    "--task", "tasks", multiple=True, help="Choose among these tasks only; one skips routing. May be repeated."
)
batch_size_option = click.option(
    "--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Inputs per batch."
)
engine_option = click.option(
    "--engine", metavar="local|ray|ray://HOST:PORT", help="Where the work runs; threads of this process by default."
)
device_option = click.option(
    "--device", default="auto", show_default=True, help="Where to compute: cpu, cuda:1, mps; auto takes a GPU."
)
cache_option = click.option(
    "--cache", default="0", show_default=True, help="Memory for dense weights of frequent sets, such as 512MB."
)


def placement_options(function: _F) -> _F:
    """Add `--device` and `--dtype`."""
    dtype = click.option(
        "--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Type to run models in."
    )
    return device_option(dtype(function))


def verb(function: _F) -> _F:
    """Add `--json`, `-q` and `-v`, and turn errors into one message and an exit code."""

    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
    @click.option("-q", "--quiet", is_flag=True, help="No progress, no tables; only warnings and errors.")
    @click.option("-v", "--verbose", is_flag=True, help="Print more, and the full traceback of an error.")
    @functools.wraps(function)
    def wrapped(*args: Any, verbose: bool, **kwargs: Any) -> None:
        """Run the verb; a fault becomes a message and an exit code."""
        logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(name)s: %(message)s")
        _escape_on_stdout()
        try:
            function(*args, **kwargs)
        except MassError as error:
            _complain(str(error), verbose)
            sys.exit(2 if isinstance(error, InputError) else 1)
        except BrokenPipeError:  # the reader of a pipe went away, as with `mass inspect out | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except OSError as error:
            _complain(f"{error.filename}: {error.strerror}." if error.filename else str(error), verbose)
            sys.exit(1)

    return wrapped  # type: ignore[return-value]


def _escape_on_stdout() -> None:
    """Names of files need not be UTF-8; what cannot be encoded is escaped, as standard error does it by itself."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def escaped(text: str) -> str:
    """The same where a library, rather than a file of ours, would have to encode it."""
    return text.encode("utf-8", "backslashreplace").decode()


def _complain(message: str, verbose: bool) -> None:
    if verbose:
        logging.exception("trace")
    click.echo(f"{click.style('error', fg='red', bold=True)}: {message}", err=True)


def print_json(data: object) -> None:
    """Data as JSON on standard output."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_problems(problems: Sequence[Problem]) -> None:
    """Problems on standard error, errors last so that they are seen."""
    for problem in sorted(problems, key=lambda p: p.level == "error"):
        colour = "red" if problem.level == "error" else "yellow"
        click.echo(f"{click.style(problem.level, fg=colour, bold=True)}: {problem}", err=True)


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def seconds(count: float) -> str:
    """A time as people say it."""
    if count < 90:
        return f"{count:.0f} s"
    return f"{count / 60:.0f} min" if count < 5400 else f"{count / 3600:.1f} h"


def plural(count: int, noun: str) -> str:
    """A number with its noun: `1 task`, `2 tasks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows under headers; columns of numbers stand to the right."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(x) for x in column) for column in zip(headers, *cells, strict=True)]
    right = [bool(cells) and all(_numeric(row[i]) for row in cells) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        """A row, numbers to the right."""
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()

    return "\n".join([click.style(line(headers), bold=True), *(line(row) for row in cells)])


def _numeric(cell: str) -> bool:
    """Whether a cell reads as a number, with or without a unit, or as the lack of one."""
    return cell in ("", "-", "none") or re.match(r"-?\d[\d.,]*( ?(%|B|kB|MB|GB|s|ms|to \d+))?$", cell) is not None


class BarProgress:
    """A merge's progress as a bar with elapsed and remaining time, on standard error."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: tqdm[Any] | None = None
        self.problems: list[Problem] = []

    def start(self, total: int, done: int) -> None:
        """Open the bar; an earlier run's tensors count as done."""
        self.close()
        if done and not self._quiet:
            click.echo(f"resuming an earlier merge: {done} of {total} tensors are done", err=True)
        self._bar = tqdm(total=total, initial=done, unit="tensor", disable=self._quiet or None, leave=False)

    def tensor(self, name: str) -> None:
        """One tensor further."""
        assert self._bar is not None
        self._bar.set_description_str(name[-40:], refresh=False)
        self._bar.update()

    def phase(self, name: str) -> None:
        """The tensors are done."""
        self.close()
        if not self._quiet:
            click.echo(name, err=True)

    def warning(self, problem: Problem) -> None:
        """Keep a warning; it is shown at the end."""
        self.problems.append(problem)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()


@contextmanager
def writing(target: str, place: Path | None = None) -> Iterator[None]:
    """Errors of the disk with the name of the target, which a write that fails does not tell.

    Args:
        target: what the user calls it.
        place: where it is written, if under another name.
    """
    try:
        yield
    except BrokenPipeError:  # the reader went away, which is no fault: see `verb`
        raise
    except OSError as error:
        if error.filename not in (None, target, str(place)):
            raise
        raise MassError(f"{target}: cannot be written ({error.strerror or error}).") from None


def hub_bars(*, shown: bool) -> None:
    """Show or hide the bars of the hub's client, which `main` has hidden with those of transformers."""
    from huggingface_hub import utils

    (utils.enable_progress_bars if shown else utils.disable_progress_bars)()  # type: ignore[attr-defined]


def bars(*, hidden: bool) -> Callable[[Iterable[Any], str, int], Iterable[Any]]:
    """What shows a bar while the items of an iterable take time."""
    return lambda items, what, total: tqdm(items, what, total, leave=False, disable=hidden or None, delay=1.0)


@contextmanager
def counting(quiet: bool, unit: str) -> Iterator[Callable[[str], None]]:
    """A bar without a known end, as a function to call with the name of each step."""
    with tqdm(unit=unit, disable=quiet or None, leave=False, delay=1.0) as bar:

        def step(name: str) -> None:
            """Show the name of a step, and that one more is done."""
            bar.set_description_str(name[-50:], refresh=False)
            bar.update()

        yield step


def named_answers(
    rows: Iterable[NamedInput], answer: Callable[[Iterator[Any]], Iterator[_A]]
) -> Iterator[tuple[str, _A]]:
    """Names of inputs and answers side by side; a name waits only for its own batch."""
    names: list[str] = []

    def items() -> Iterator[Any]:
        """The inputs, their names noted as they are asked for."""
        for row in rows:
            names.append(row.name)
            yield row.item

    for given in answer(items()):
        yield names.pop(0), given


def refuse_unreadable(model: Model) -> None:
    """Raise an error if the bundle has no tokenizer or image processor: it is wrong then, and not each of the inputs."""
    _ = model.core.reader.processor  # which is loaded when first looked at


def refuse_failures(failed: int, count: int, noun: str) -> None:
    """Raise an error if some of the inputs could not be answered, or if there was none."""
    if count == 0:
        raise MassError(f"there is no {noun} to answer.")
    if failed:
        rest = "; the others were" if failed < count else ""
        raise MassError(f"{failed} of {plural(count, noun)} could not be answered{rest}.")
