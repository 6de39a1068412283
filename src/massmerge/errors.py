"""Errors, with messages for the person who reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


class MassError(Exception):
    """The work failed: a full disk, a file that disappeared, a difference that verification found. Exit code 1."""


class InputError(MassError):
    """The call was wrong: recipe, expert, bundle or option. Exit code 2, and nothing was written."""


class DamageError(InputError):
    """A bundle's files are not what its manifest says, or have changed while they were in use."""


@dataclass(frozen=True)
class Problem:
    """One thing found wrong with a recipe or its sources, before any work."""

    where: str
    message: str
    level: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def problems_error(problems: Iterable[Problem]) -> InputError:
    """All problems as one error, one per line."""
    return InputError("\n".join(str(p) for p in problems))


def listing(names: Iterable[str], most: int = 12) -> str:
    """Names as an indented list, cut after `most` of them with a count of the rest."""
    rows = list(names)
    shown = [f"\n    {row}" for row in rows[:most]]
    if len(rows) > most:
        shown.append(f"\n    … and {len(rows) - most} more")
    return "".join(shown)
