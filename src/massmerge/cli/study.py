"""`mass study`: the paper's experiments on a suite, by name."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from massmerge.cli.by_engine import workers_option
from massmerge.cli.common import bars, batch_size_option, engine_option, placement_options, print_json, table, verb
from massmerge.errors import InputError
from massmerge.evaluation.report import Table
from massmerge.research.studies import STUDIES
from massmerge.research.studies.result import Result, verdict_words
from massmerge.research.studies.run import ALL
from massmerge.research.studies.run import study as run_study


@click.command("study")
@click.argument("name", required=False)
@click.argument("suite", required=False, type=click.Path(dir_okay=False))
@click.option("--list", "listed", is_flag=True, help="List the studies.")
@click.option(
    "--bundle", type=click.Path(file_okay=False), help="The bundle to study; if not given, the recipe is merged."
)
@click.option("--recipe", type=click.Path(dir_okay=False), help="The recipe with the experts, which some studies need.")
@click.option("--out", type=click.Path(file_okay=False), default="study", show_default=True,
              help="Folder for results; each study gets a folder of its name in it.")  # fmt: skip
@click.option("--split", help="What {split} stands for in the suite's paths, such as validation.  [default: test]")
@click.option("--limit", type=click.IntRange(min=1), help="At most this many rows per task, drawn at random.")
@click.option("--quick", is_flag=True, help="At most 20 rows per task unless --limit is given, and coarse grids.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="For the draw of rows and everything else that is random.")  # fmt: skip
@batch_size_option
@placement_options
@engine_option
@workers_option
@click.option("--search", is_flag=True, help="sweep: also search η, K, ε and the site on the validation split.")
@click.option(
    "--trials",
    type=click.IntRange(min=2),
    default=40,
    show_default=True,
    help="sweep: number of settings that --search tries.",
)
@click.option("--peer", "peers", multiple=True, metavar="PEER.OPTION=VALUE",
              help="methods, oracle, storage: an option of a routed peer, such as smile_1.rank=16; repeatable.")  # fmt: skip
@verb
def study(
    name: str | None, suite: str | None, listed: bool, bundle: str | None, recipe: str | None, out: str,
    split: str | None, limit: int | None, quick: bool, seed: int, batch_size: int, device: str, dtype: str,
    engine: str | None, workers: int | None, search: bool, trials: int, peers: tuple[str, ...], as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Run the study NAME, or all, on the labelled data of SUITE.

    If interrupted, run the same command to resume.
    """
    if listed:
        _list(as_json=as_json)
        return
    if name is None or suite is None:
        raise InputError("name a study and a suite, such as `mass study layers suite.yaml --bundle out/`.")
    hushed = quiet or as_json

    def tell(sentence: str) -> None:
        """Print a sentence on what is being done."""
        if not hushed:
            click.echo(sentence, err=True)

    command = shlex.join(["mass", *sys.argv[1:]]) if Path(sys.argv[0]).name == "mass" else ""
    results = run_study(
        name, suite, bundle=bundle, recipe=recipe, out=out, split=split, limit=limit, quick=quick, seed=seed,
        batch_size=batch_size, device=device, dtype=dtype, engine=engine, workers=workers,
        search=search, trials=trials, peers=peers, command=command,
        progress=bars(hidden=hushed), tell=tell,
    )  # fmt: skip
    if as_json:
        print_json([result.to_dict() for result in results] if name == ALL else results[0].to_dict())
    elif not quiet:
        for result in results:
            click.echo(describe(result) + "\n")
        where = out if name == ALL else f"{out}/{name}"
        click.echo(f"report in {where}: report.html, report.md, result.json, plots")


def _list(*, as_json: bool) -> None:
    rows = [(one.name, one.question, _needs(one)) for one in STUDIES.values()]
    if as_json:
        print_json([{"name": name, "question": question, "needs": needs} for name, question, needs in rows])
        return
    for name, question, needs in rows:
        click.echo(f"{click.style(name, bold=True):<24} {question}{f' Needs {needs}.' if needs else ''}")
    click.echo(f"{click.style(ALL, bold=True):<24} Every one of them, and one report.")


def _needs(one: Any) -> str:
    wanted = ["--recipe"] * one.needs_recipe + ["the split validation"] * one.needs_validation
    return " and ".join(wanted)


def describe(result: Result) -> str:
    """A study for the terminal: who won, and the tables."""
    parts = [
        click.style(result.study.title, bold=True),
        verdict_words(result.finding.verdict),
        "\n".join(result.finding.sentences),
    ]
    parts += [table(part.headers, part.rows) for part in result.finding.parts if isinstance(part, Table)]
    return "\n\n".join(part for part in [*parts, *result.finding.notes] if part)
