"""Imports of modules that need torch and transformers, which takes seconds."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Any

from massmerge.io.collector import collector_paused


def with_libraries(path: str) -> Any:
    """A module and the libraries that it needs, silenced: their warnings and bars are about steps nobody has asked for."""
    first = path not in sys.modules
    with collector_paused():
        module = import_module(path)
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
    if first:
        gc.freeze()  # what they bring along stays until the end: to look through it again took a fifth of a short merge
    return module
