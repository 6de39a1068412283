"""The command in a process of its own, which can be killed at a chosen moment."""

import os
import re
import signal
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from itertools import count
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import RLock

from tqdm import tqdm

# Importing the libraries takes longer than a merge of tiny models, so a server imports them once and forks.
_context = get_context("forkserver")
_context.set_forkserver_preload(
    [
        "massmerge.cli.merge",
        "massmerge.cli.merge_steps",
        "massmerge.cli.calibrate",
        "massmerge.cli.export",
        "massmerge.cli.main",
        "massmerge.serve.server",
        "transformers.models.auto.processing_auto",
        "transformers.models.bert.modeling_bert",
        "transformers.models.bert.tokenization_bert",
    ]
)
_TOUCHES = {"open", "os.link", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
_WORK_FOLDER = re.compile(r".*\.(?:partial|export)(?=/|$)")


def run_mass(arguments: list[str], log: str, kill_at: int | None) -> None:
    """Run `mass`, note each time that it touches its work folder, and die at the given one, counted from 0."""
    numbers = count()
    notes = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def hear(event: str, details: tuple) -> None:
        if event not in _TOUCHES:
            return
        path = str(details[1] if event == "os.link" else details[0])
        if not _WORK_FOLDER.match(path) and event not in ("os.remove", "os.rmdir"):
            return
        writes = event == "open" and "w" in str(details[1])
        os.write(notes, f"{'write' if writes else event} {_WORK_FOLDER.sub('', path)}\n".encode())
        if next(numbers) == kill_at:
            if writes:
                Path(path).write_bytes(b"half")  # as if it died while it wrote this file
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)
    tqdm.set_lock(RLock())  # its own is one between processes, which a killed one would leave behind
    from massmerge.cli.main import main

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        main(arguments)


def start_mass(*arguments: object, log: str = os.devnull, kill_at: int | None = None) -> ForkServerProcess:
    """Start `mass` with these arguments."""
    process = _context.Process(target=run_mass, args=([str(a) for a in arguments], log, kill_at))
    process.start()
    return process


def mass(*arguments: object, kill_at: int | None = None) -> tuple[int | None, list[str]]:
    """Run `mass` to its end; returns its exit code (negative: the signal that ended it) and what it touched."""
    with tempfile.NamedTemporaryFile("r") as log:
        process = start_mass(*arguments, log=log.name, kill_at=kill_at)
        process.join(60)
        process.kill()
        return process.exitcode, log.read().splitlines()
