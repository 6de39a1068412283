"""From what a person writes to an engine: `local`, `ray`, `ray://host:port`, or the name of one that a package adds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points

from massmerge.engines.job import Engine
from massmerge.engines.local import LocalEngine
from massmerge.errors import InputError

GROUP = "massmerge.engines"
"""Entry points of this group are called with the text after `name://`, or None, and with the number of workers."""


@contextmanager
def opened_engine(engine: str | Engine | None, workers: int | None = None) -> Iterator[Engine]:
    """An engine by its name, closed afterwards; one that is given as an object is left open.

    Args:
        engine: `local` (the default), `ray`, `ray://host:port`, the name of an entry point, or an engine.
        workers: units that run at the same time, at most; what the engine has by default.

    Raises:
        InputError: there is no such engine, or it cannot be reached.
    """
    if engine is not None and not isinstance(engine, str):
        yield engine
        return
    chosen = _named(engine or "local", workers)
    try:
        yield chosen
    finally:
        chosen.close()


def _named(text: str, workers: int | None) -> Engine:
    name, _, address = text.partition("://")
    if text == "local":
        return LocalEngine(workers)
    if name == "ray":
        from massmerge.engines.ray import RayEngine

        return RayEngine(text if address else None, workers)
    others = {point.name: point for point in entry_points(group=GROUP)}
    if name in others:
        found: Engine = others[name].load()(address or None, workers)
        return found
    known = ", ".join(["local", "ray", "ray://host:port", *sorted(others)])
    raise InputError(f"engine {text!r}: there is none of that name. Choose from {known}.")
