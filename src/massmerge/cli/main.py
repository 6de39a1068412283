"""The command and its verbs."""

from __future__ import annotations

import io
import os
import sys
import warnings

import click

import massmerge
from massmerge.cli.calibrate import calibrate
from massmerge.cli.demo import demo
from massmerge.cli.eval import eval_
from massmerge.cli.explain import explain
from massmerge.cli.export import export
from massmerge.cli.generate import generate
from massmerge.cli.head import head
from massmerge.cli.inspect import inspect
from massmerge.cli.interpret import interpret
from massmerge.cli.merge import merge
from massmerge.cli.plan import plan
from massmerge.cli.predict import predict
from massmerge.cli.serve import serve
from massmerge.cli.study import study
from massmerge.cli.verify import verify


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(massmerge.__version__, prog_name="mass")
def main() -> None:
    """One backbone and many fine-tuned experts, shipped as one model that finds the task by itself.

    Start with `mass demo`, or write a recipe and run `mass plan recipe.yaml`.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a letter shows its number
    warnings.filterwarnings("ignore", module="transformers")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # people have no use for our source line
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


for verb in (
    plan,
    merge,
    predict,
    generate,
    explain,
    inspect,
    interpret,
    verify,
    calibrate,
    eval_,
    study,
    export,
    head,
    serve,
    demo,
):
    main.add_command(verb)
