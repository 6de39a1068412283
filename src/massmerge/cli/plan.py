"""`mass plan`: what would happen."""

from __future__ import annotations

import sys

import click

from massmerge.cli.common import plural, print_json, print_problems, seconds, size, table, verb
from massmerge.merging.open_recipe import make_plan
from massmerge.merging.plan import Plan

_SAVES = 0.95  # a bundle that weighs more than this share of its experts is no smaller in any way that matters


@click.command()
@click.argument("recipe", type=click.Path(dir_okay=False))
@click.option("--tensors", is_flag=True, help="List every tensor with its ranks.")
@click.option("--strict", is_flag=True, help="Exit with code 2 on warnings too.")
@verb
def plan(recipe: str, tensors: bool, strict: bool, as_json: bool, quiet: bool) -> None:
    """Show what a merge of RECIPE would do: tasks, ranks, bytes, memory, time, problems.

    Reads configurations, headers, and as much of local experts as shows which tensors they change. Downloads no weights.
    """
    show_plan(make_plan(recipe), tensors=tensors, strict=strict, as_json=as_json, quiet=quiet)


def show_plan(made: Plan, *, tensors: bool, strict: bool, as_json: bool, quiet: bool) -> None:
    """Print a plan and its problems; where they forbid the merge, the exit code is 2."""
    if as_json:
        print_json(made.to_dict())
    elif not quiet:
        click.echo(describe(made, tensors=tensors))
    print_problems(made.problems)
    if made.tasks and made.left_out and not quiet:
        click.echo(f"the figures above leave out {', '.join(made.left_out)}, which could not be opened", err=True)
    if made.errors or (strict and made.problems):
        sys.exit(2)


def describe(made: Plan, *, tensors: bool = False) -> str:
    """A plan for the terminal."""
    if not made.tasks:
        return f"none of {plural(len(made.left_out), 'task')} on {made.base} ({made.base_class}) could be opened"
    parts = [
        f"{plural(len(made.tasks), 'task')} on {made.base} ({made.base_class}), method {made.method}",
        table(
            ["task", "expert", "form", "head", "labels", "factors", "whole", "head size"],
            [
                [t.name, t.source, t.form, t.head, len(t.labels) if t.labels else "none",
                 size(t.factor_bytes), size(t.whole_bytes), size(t.head_bytes)]
                for t in made.tasks
            ],
        ),
    ]  # fmt: skip
    if made.matrices:
        parts.append(table(["matrices", "shape", "count", "ranks"], _shapes(made)))
    if tensors and made.tensors:
        rows = [
            [t.name, t.kind, "×".join(map(str, t.shape)), _ranks(t.ranks) if t.matrix else "whole"]
            for t in made.tensors
        ]
        parts.append(table(["tensor", "kind", "shape", "ranks"], rows))
    return "\n\n".join([*parts, _sizes(made), _summary(made)])


def _sizes(made: Plan) -> str:
    sizes = made.sizes
    rows = [("base", sizes.base), ("factors", sizes.factors), ("stored whole", sizes.whole)]
    rows += [("fixed model", sizes.fixed)] * bool(sizes.fixed) + [("everything else", sizes.rest)]
    rows += [("together", sizes.counted), ("heads, not counted", sizes.heads)]
    return table(["part", "size", "of the base"], [[n, size(b), f"{b / sizes.base:.3f}"] for n, b in rows])


def _summary(made: Plan) -> str:
    """What it comes to, beside what it costs to keep the experts as they are."""
    about = "" if made.ranks_exact else "at most "
    apart = made.apart / made.sizes.base
    text = (
        f"{about}{made.sizes.ratio:.2f} times the base, the experts as they are {apart:.2f} times; "
        f"peak memory about {size(made.peak_memory)}, time about {seconds(max(1.0, made.seconds))}"
    )
    if made.method == "mass" and made.sizes.counted > _SAVES * made.apart:
        text += "\nThis saves no space. Lower `merge.budget`, or merge more tasks: they share the budget."
    return text


def _shapes(made: Plan) -> list[list[object]]:
    """Matrices grouped by kind and shape, with the range of their ranks."""
    groups: dict[tuple[str, tuple[int, int]], list[int]] = {}
    counts: dict[tuple[str, tuple[int, int]], int] = {}
    for t in made.matrices:
        assert t.matrix is not None
        key = t.kind, t.matrix
        groups.setdefault(key, []).extend(k for k in t.ranks if k)
        counts[key] = counts.get(key, 0) + 1
    return [[kind, f"{m}×{n}", counts[kind, (m, n)], _ranks(r)] for (kind, (m, n)), r in sorted(groups.items())]


def _ranks(ranks: list[int] | tuple[int, ...]) -> str:
    used = [k for k in ranks if k]
    return "none" if not used else str(used[0]) if min(used) == max(used) else f"{min(used)} to {max(used)}"
