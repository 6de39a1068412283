"""The command in a process of its own, which can be killed at a chosen moment."""

import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from itertools import count
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from typing import Any

# Importing the libraries takes longer than a merge of tiny models, so a server imports them once and forks.
_context = get_context("forkserver")
_context.set_forkserver_preload(["massmerge.cli.main", "transformers.models.bert.modeling_bert"])
_TOUCHES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}


def run_mass(arguments: list[str], touches: Any, kill_at: int | None) -> None:
    """Run `mass`, count how often it touches its work folder, and die at the given touch."""

    numbers = count(1)

    def hear(event: str, details: tuple) -> None:
        if event in _TOUCHES and (".partial" in str(details[0]) or event in ("os.remove", "os.rmdir")):
            touches.value = next(numbers)
            if touches.value == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)
    from massmerge.cli.main import main

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        main(arguments)


def start_mass(*arguments: object, kill_at: int | None = None) -> tuple[ForkServerProcess, Any]:
    """Start `mass` with these arguments; returns the process and the count of its touches."""
    touches = _context.Value("i", 0, lock=False)  # a process that is killed would never give a lock back
    process = _context.Process(target=run_mass, args=([str(a) for a in arguments], touches, kill_at))
    process.start()
    return process, touches


def mass(*arguments: object, kill_at: int | None = None) -> tuple[int | None, int]:
    """Run `mass` to its end; returns its exit code (negative: the signal that ended it) and the count of touches."""
    process, touches = start_mass(*arguments, kill_at=kill_at)
    process.join(60)
    process.kill()
    return process.exitcode, touches.value
