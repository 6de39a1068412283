"""`mass serve`: a bundle as an HTTP service."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import click

from massmerge.bundle.reader import Bundle
from massmerge.cli.common import batch_size_option, cache_option, placement_options, verb
from massmerge.errors import InputError, MassError


def finite(_: click.Context, __: click.Parameter, value: float) -> float:
    """Ranges take infinity, and what is not a number is in every range."""
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a valid number of seconds.")
    return value


def _upstream(options: dict[str, Any], key_file: Path | None) -> dict[str, Any]:
    """The options with those of an upstream checked; where there is one, nothing is answered here."""
    from massmerge.serve.openai.upstream import upstream_url
    from massmerge.serve.settings import read_key

    if options["upstream"] is None:
        if key_file or options["fallback_model"]:
            raise InputError("--upstream-key-file and --fallback-model are of use with --upstream only.")
        return options
    key = read_key(key_file) if key_file else None
    return {**options, "upstream": upstream_url(options["upstream"]), "upstream_key": key, "route_only": True}


@click.command()
@click.argument("bundle", type=click.Path(file_okay=False))
@click.option("--route-only", is_flag=True, help="Load only what names tasks: POST /v1/route, and --upstream.")
@click.option(
    "--upstream",
    metavar="URL",
    help="Server of OpenAI's protocol: requests go on to it with their task as the model. Implies --route-only.",
)
@click.option(
    "--upstream-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the key that the upstream asks for.",
)
@click.option("--fallback-model", metavar="NAME", help="Model of the upstream for prompts that no task fits.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option("--name", help="Name of the model in answers; the folder's name by default.")
@click.option(
    "--examples", type=click.Path(exists=True, path_type=Path), help="Inputs that the page offers: a file or folder."
)
@click.option("--column", help="Column of a .csv, .jsonl or .parquet file that holds the examples.")
@click.option(
    "--api-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the key that requests must carry.",
)
@click.option(
    "--cors-origin", "cors_origins", multiple=True, help="Let pages of this origin call the API. May be repeated."
)
@batch_size_option
@click.option(
    "--batch-wait",
    type=click.FloatRange(0),
    callback=finite,
    default=3.0,
    show_default=True,
    help="Milliseconds that an input waits for others to share its batch.",
)
@click.option(
    "--queue", type=click.IntRange(1), default=512, show_default=True, help="Inputs that may wait in the queue."
)
@click.option(
    "--sessions", type=click.IntRange(1), default=10_000, show_default=True, help="Sessions that are remembered."
)
@click.option(
    "--session-expiry",
    type=click.FloatRange(0, min_open=True),
    callback=finite,
    default=600.0,
    show_default=True,
    help="Seconds without a request after which a session is forgotten.",
)
@click.option(
    "--reservoir",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep activations of a sample of inputs in this file (.safetensors), for `mass adapt`.",
)
@click.option(
    "--reservoir-size", type=click.IntRange(1), default=2000, show_default=True, help="Inputs in that sample."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    callback=finite,
    default=30.0,
    show_default=True,
    help="Seconds within which a request is answered or refused.",
)
@click.option("--max-requests", type=click.IntRange(1), default=256, show_default=True, help="Requests in progress.")
@click.option(
    "--max-body", type=click.IntRange(1), default=20_000_000, show_default=True, help="Bytes of a request's body."
)
@click.option(
    "--max-held",
    type=click.IntRange(1),
    default=200_000_000,
    show_default=True,
    help="Bytes of all requests in progress.",
)
@click.option("--max-items", type=click.IntRange(1), default=128, show_default=True, help="Inputs of one request.")
@click.option("--max-text", type=click.IntRange(1), default=100_000, show_default=True, help="Characters of one text.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Tokens that are written for one request, and how many where it does not say.",
)
@click.option(
    "--max-pixels", type=click.IntRange(1), default=25_000_000, show_default=True, help="Pixels of one image."
)
@click.option(
    "--max-request-pixels",
    type=click.IntRange(1),
    default=100_000_000,
    show_default=True,
    help="Pixels of the images of one request.",
)
@click.option(
    "--max-held-pixels",
    type=click.IntRange(1),
    default=400_000_000,
    show_default=True,
    help="Pixels of all images that are being decoded.",
)
@click.option("--max-connections", type=click.IntRange(1), default=1000, show_default=True, help="Open connections.")
@click.option(
    "--grace",
    type=click.FloatRange(0),
    callback=finite,
    default=10.0,
    show_default=True,
    help="Seconds to finish requests in progress when the service stops.",
)
@click.option(
    "--mapped", is_flag=True, help="Map tensors from the bundle's files, which must not change while it runs."
)
@click.option("--threads", type=click.IntRange(1), help="Threads of torch; all cores by default.")
@placement_options
@cache_option
@click.option("--router", help="A router fitted by `mass calibrate`; the bundle's by default.")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Format of the log."
)
@verb
def serve(
    bundle: str,
    api_key_file: Path | None,
    upstream_key_file: Path | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Serve BUNDLE over HTTP: an API with batching at /v1/predict, a page at /, a description at /docs.

    Listens on this machine only by default. SIGTERM finishes the requests in progress and stops; SIGHUP reloads the bundle
    without losing a request.
    """
    try:
        from massmerge.serve.logs import set_up_logs
        from massmerge.serve.server import bind, run
        from massmerge.serve.settings import ServiceSettings, read_api_key
    except ImportError as error:
        raise MassError(f"serving needs {error.name}: pip install 'massmerge[serve]'") from None
    opened = Bundle(bundle, check=False)  # anything else is refused before the service starts
    options["name"] = options["name"] or Path(str(bundle).partition("@")[0]).resolve().name
    if options["max_items"] > options["queue"]:
        raise InputError("--max-items is more than --queue: such a request could never be answered.")
    if options["reservoir"] is not None and options["reservoir"].suffix != ".safetensors":
        raise InputError(f"{options['reservoir']}: the name of a reservoir ends in .safetensors.")
    key = read_api_key(api_key_file) if api_key_file else None
    settings = ServiceSettings(opened.path, api_key=key, **_upstream(options, upstream_key_file))
    verbose = logging.getLogger().isEnabledFor(logging.INFO)
    set_up_logs(settings.log_format, logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    listener = bind(settings)
    if key is None and not settings.is_private:
        message = "other machines can reach this service without a key: set one with --api-key-file"
        logging.getLogger("massmerge.serve").warning(message)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def ready() -> None:
        """Say where the service is, once it answers."""
        if as_json:
            click.echo(json.dumps({"url": url, "pid": os.getpid(), "model": settings.model_name}))
        elif not quiet:
            click.echo(
                f"{settings.model_name} is ready: {url} is the page, {url}/docs describes the API. Ctrl-C stops."
            )

    run(settings, listener, ready)
