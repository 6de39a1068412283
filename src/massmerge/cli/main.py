"""The command and its verbs."""

from __future__ import annotations

import os
import warnings
from difflib import get_close_matches
from importlib import import_module

import click

import massmerge
from massmerge.io.allocator import keep_buffers

_MODULES = {"demo": "demo.command"}
_ANSWER = ("predict", "generate", "explain", "interpret", "calibrate", "eval", "study", "demo")  # run batch after batch
# Every other verb has a module of its name. What they import takes seconds, so the list of verbs is told without them.
VERBS = {
    "plan": "What a merge of RECIPE would do: tasks, ranks, bytes, memory, time, problems.",
    "merge": "Merge the experts of RECIPE into the bundle OUT.",
    "add": "Add tasks to BUNDLE; the experts of its other tasks are not needed.",
    "remove": "Remove TASKS from BUNDLE; the others stay as they are, and no expert is needed.",
    "predict": "Answer INPUTS with BUNDLE: text, image files, folders, .txt, .csv, .jsonl, .parquet, or - for lines on "
    "standard input.",
    "generate": "Write answers to PROMPTS with BUNDLE: text, files, folders, .csv, .jsonl, .parquet, or - for lines on "
    "standard input.",
    "explain": "Show how BUNDLE answers INPUT: residual and weight of every task, selected set, heads, time.",
    "inspect": "Look into BUNDLE: tasks, labels, ranks, sizes, kept energy, similarity, what the redundancy filter left "
    "out.",
    "interpret": "Decode the singular vectors of BUNDLE's tasks as texts (TextSpan): what each subspace means.",
    "verify": "Check every checksum of BUNDLE, and with --experts its deltas; exit code 1 where something is off.",
    "calibrate": "Fit a router of BUNDLE on a few inputs of each task; no labels are needed.",
    "eval": "Measure BUNDLE on the labelled data that SUITE names.",
    "study": "Run the study NAME, or all, on the labelled data that SUITE names.",
    "export": "Write tasks of BUNDLE to the folder TARGET in a form that other software reads.",
    "head": "Make a head of the class names in the file CLASSES by the text tower of BASE, and write it to OUT.",
    "serve": "Serve BUNDLE over HTTP: an API with batching at /v1/predict, a page at /, a description at /docs.",
    "demo": "Show what mass does: merge real experts, evaluate the bundle, explain answers (a minute).",
}


class Verbs(click.Group):
    """Verbs that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in the order of the work."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The verb of that name."""
        if name not in VERBS:
            return None
        module = import_module(f"massmerge.cli.{_MODULES.get(name, name)}")
        _silence_transformers()
        if name in _ANSWER:
            keep_buffers()
        found: click.Command = getattr(module, "eval_" if name == "eval" else name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that was called; a slip of the pen is told the verb that was meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            meant = get_close_matches(args[0], VERBS, 1)
            if not meant:
                raise
            raise click.UsageError(f"{error.message} Did you mean {meant[0]!r}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of verbs in the help."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


def _silence_transformers() -> None:
    """Its warnings and bars are about steps that people have not asked for."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(massmerge.__version__, prog_name="mass")
def main() -> None:
    """One backbone and many fine-tuned experts, shipped as one model that finds the task by itself.

    Start with `mass demo`, or write a recipe and run `mass plan recipe.yaml`.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", module="transformers")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # people have no use for our source line
