"""The tour of a demo: each step with the command that does it, and of its result what matters.

The commands print more than is shown here; the figures are theirs, found there and then.
"""

from __future__ import annotations

import shlex
import textwrap
import time
from itertools import combinations
from typing import Any

import click

from massmerge.bundle.inspect import inspect_bundle
from massmerge.bundle.reader import Bundle
from massmerge.cli.common import BarProgress, bars, plural, print_problems, size, table
from massmerge.cli.demo.folder import Demo
from massmerge.errors import InputError
from massmerge.evaluation.evaluate import evaluate
from massmerge.evaluation.results import Evaluation
from massmerge.evaluation.summary import percent
from massmerge.io.rows import read_inputs
from massmerge.merging.open_recipe import make_plan
from massmerge.merging.run import merge
from massmerge.model.answers import Prediction
from massmerge.model.explain import explain
from massmerge.model.load import load
from massmerge.model.model import Model

_BAR = 24
_SHOWN_TASKS = 3
_INDENT = "   "


class Tour:
    """A demo's steps, one after the other.

    Args:
        demo: the folder that was laid out.
        quiet: print nothing but warnings and errors.
    """

    def __init__(self, demo: Demo, *, quiet: bool) -> None:
        self.demo, self.quiet, self._number = demo, quiet, 0

    def run(self, began: float) -> dict[str, Any]:
        """All steps; returns where everything is, and the figures.

        Args:
            began: when the demo began, by `time.perf_counter`.
        """
        demo = self.demo
        self._introduce()
        self._plan()
        self._merge()
        self._inspect()
        found = self._evaluate()
        model = load(demo.bundle)
        self._step("Why does an input go where it goes?")
        answers = [self._explain(model, given) for given in demo.inputs]
        took = time.perf_counter() - began
        self._say(f"\nDone in {took:.0f} s.")
        self._say(f"\n{click.style('Next', bold=True)}, in {demo.folder}")
        self._body(_next(demo))
        return {
            "folder": str(demo.folder), "recipe": str(demo.recipe), "suite": str(demo.suite), "bundle": str(demo.bundle),
            "figures": {name: mean.value for name, mean in found.means.items()},
            "answers": [{"task": answer.task, "label": answer.label} for answer in answers],
            "seconds": round(took, 1),
        }  # fmt: skip

    # The steps

    def _introduce(self) -> None:
        demo, placed = self.demo, self.demo.placed
        rows = [["base", demo.base], ["experts", demo.experts], ["folder", f"{demo.folder}: {_made(demo)}"]]
        if placed.kept:
            rows.append(["", f"changed since the last demo, saved as {', '.join(placed.kept)}"])
        self._say(click.style("One base and many experts become one bundle that finds the task by itself", bold=True))
        self._body("\n".join(f"{name:9}{text}" for name, text in rows), before="\n")
        self._say(f"\nCommands run in that folder:  {_command(['cd', str(demo.folder)])}")

    def _plan(self) -> None:
        self._step("What would a merge do? Nothing is written yet.", ["mass", "plan", "recipe.yaml"])
        made = make_plan(self.demo.recipe)
        print_problems(made.problems)
        tasks = [
            [t.name, len(t.labels or ()), _some(t.labels or ()), size(t.factor_bytes + t.whole_bytes)]
            for t in made.tasks
        ]
        self._body(table(["task", "labels", "such as", "in the bundle"], tasks))
        self._body(
            f"\nbundle {made.sizes.ratio:.2f} times the base; {plural(len(tasks), 'model')} of that size would be "
            f"{len(tasks):.2f} times"
        )

    def _merge(self) -> None:
        words, out = ["mass", "merge", "recipe.yaml", "out"], self.demo.bundle
        self._step("Merge: no training, no data.", words)
        began, reused = time.perf_counter(), out.exists()
        try:
            self._run_merge()
        except InputError:
            if not reused:
                raise
            # The bundle of an earlier demo, of other files than these.
            self._body(f"out is of other files than these; replaced by  {_command([*words, '--overwrite'])}")
            reused = False
            self._run_merge(overwrite=True)
        written = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
        took = time.perf_counter() - began
        self._body("out is already complete: reused" if reused else f"out: {size(written)} in {took:.1f} s")

    def _run_merge(self, *, overwrite: bool = False) -> None:
        progress = _Progress(quiet=self.quiet)
        try:
            merge(self.demo.recipe, self.demo.bundle, overwrite=overwrite, progress=progress)
        finally:
            progress.close()
        print_problems(progress.problems)

    def _inspect(self) -> None:
        self._step("What is in it?", ["mass", "inspect", "out"])
        report = inspect_bundle(Bundle(self.demo.bundle))
        rows = [
            [t.name, t.form, f"{t.rank_low} to {t.rank_high}" if t.rank_low != t.rank_high else t.rank_high,
             f"{100 * t.energy:.1f} %"]
            for t in report.tasks
        ]  # fmt: skip
        self._body(table(["task", "expert is", "rank", "energy kept"], rows))
        pairs = combinations(range(len(report.tasks)), 2)
        value, one, other = max((report.similarity[i][j], i, j) for i, j in pairs)
        names = [task.name for task in report.tasks]
        self._body(f"\nthe two most alike are {names[one]} and {names[other]}: cosine {value:.2f}")

    def _evaluate(self) -> Evaluation:
        demo = self.demo
        limit = ["--limit", str(demo.limit)] if demo.limit else []
        self._step(
            "How good is it? Test rows of all tasks in one shuffled stream, without task names.",
            ["mass", "eval", "out", "suite.yaml", "--experts", *limit],
        )
        found = evaluate(
            demo.bundle,
            demo.suite,
            limit=demo.limit,
            experts=True,
            folder=demo.folder,
            progress=bars(hidden=self.quiet),
        )
        rows = [
            [t.task, t.rows, percent(t.strict.value), percent(t.routing.value), percent(t.known and t.known.value),
             percent(t.reference)]
            for t in found.tasks
        ]  # fmt: skip
        mean = [percent(found.means[name].value) for name in ("strict", "routing", "known", "reference")]
        rows.append(["mean", sum(task.rows for task in found.tasks), *mean])
        self._body(table(["task", "rows", "bundle", "task found", "task given", "expert alone"], rows))
        self._body("\nan answer is correct if task and label both are" + _normalised(found))
        if found.shares_labels:
            self._body(f"labels that mean the same counted as equal: {percent(found.means['shared'].value)}")
        self._body(f"{found.timings['all']:.0f} ms per input on this machine")
        return found

    def _explain(self, model: Model, given: str) -> Prediction:
        image = model.takes_images
        named = next(iter(read_inputs([str(self.demo.folder / given) if image else given], image=image)))
        if isinstance(named.item, InputError):
            raise named.item
        prediction = explain(model, named.item).prediction
        assert prediction.routing is not None
        weights = prediction.routing.weights
        best = sorted(weights, key=lambda task: -weights[task])[:_SHOWN_TASKS]
        width = max(map(len, weights))
        bars = [f"{task:{width}}  {weights[task]:.2f}  {'█' * round(_BAR * weights[task])}" for task in best]
        answer = f"{prediction.task}: {prediction.label} ({prediction.score:.2f})" if prediction.task else "unknown"
        self._say(f"{_INDENT}{_command(['mass', 'explain', 'out', given])}")
        self._body(f"{click.style(answer, fg='green', bold=True)}\n" + "\n".join(bars))
        return prediction

    # How it is printed

    def _step(self, title: str, command: list[str] | None = None) -> None:
        self._number += 1
        self._say(f"\n{click.style(f'{self._number}  {title}', bold=True)}")
        if command:
            self._say(f"{_INDENT}{_command(command)}\n")

    def _body(self, text: str, before: str = "") -> None:
        self._say(before + textwrap.indent(text, _INDENT))

    def _say(self, text: str) -> None:
        if not self.quiet:
            click.echo(text)


class _Progress(BarProgress):
    """A bar without the words of a merge's end: the tour has its own."""

    def phase(self, name: str) -> None:
        """The tensors are done."""
        self.close()


def _command(words: list[str]) -> str:
    return click.style(f"$ {_typed(words)}", fg="cyan")


def _typed(words: list[str]) -> str:
    """A command as it is typed; double quotes around texts, as people write them."""
    return " ".join(shlex.quote(word) if shlex.quote(word) == word or '"' in word else f'"{word}"' for word in words)


def _made(demo: Demo) -> str:
    """What became of the demo's files."""
    placed = demo.placed
    parts = [f"wrote {', '.join(placed.written)}"] if placed.written else []
    parts += [f"reused {', '.join(placed.reused)} of an earlier demo"] if placed.reused else []
    return "; ".join(parts)


def _normalised(found: Evaluation) -> str:
    """What the bundle reaches of its experts' accuracy; nothing can be divided by an expert that gets nothing right."""
    mean = found.means.get("normalised")
    if mean is None:
        return ""
    return (
        f": {percent(mean.value)} of what the experts reach alone (95 %: {100 * mean.low:.1f} to {100 * mean.high:.1f})"
    )


def _some(labels: tuple[str, ...]) -> str:
    """A few labels, as many as a column takes."""
    shown = textwrap.shorten(", ".join(labels), 40, placeholder=" …")
    return shown if shown.strip("… ") else labels[0][:39] + "…"


def _next(demo: Demo) -> str:
    """What to type next; every line works."""
    width = max(len(command) for command, _ in demo.next if "\n" not in command)
    return "\n".join(
        f"{click.style(f'$ {command}', fg='cyan')}{' ' * (width - len(command.splitlines()[-1]))}  {what}"
        for command, what in demo.next
    )
