"""The folder of a demo: made once, found again by a second run, never mistaken for a folder of something else."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from massmerge.errors import InputError, MassError
from massmerge.io.durable import drafted

MARK = "demo.json"
PAGE = "http://127.0.0.1:8000"  # where `mass serve` is by default


@dataclass
class Placed:
    """What became of the files that a demo lays out."""

    written: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """What files that differed from the demo's own are called now."""


@dataclass(frozen=True)
class Demo:
    """A folder that is ready to be merged, and what is to be said about it."""

    folder: Path
    base: str
    """What the base is and where it came from, in words."""
    experts: str
    """What the experts are, in words."""
    inputs: tuple[str, ...]
    """What is explained: texts, or paths of images relative to the folder."""
    next: tuple[tuple[str, str], ...]
    """Commands to go on with, and what each does."""
    placed: Placed
    limit: int | None = None
    """Rows of each task to evaluate; all without it."""

    @property
    def recipe(self) -> Path:
        """The recipe's path."""
        return self.folder / "recipe.yaml"

    @property
    def suite(self) -> Path:
        """The suite's path."""
        return self.folder / "suite.yaml"

    @property
    def bundle(self) -> Path:
        """Where the bundle goes."""
        return self.folder / "out"


def open_folder(folder: Path, kind: str) -> None:
    """Make the folder of a demo, or find one that an earlier demo of the same kind has made.

    Raises:
        InputError: it holds something else.
        MassError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and _kind(folder) != kind:
            raise InputError(
                f"{folder}: is not empty, and not an earlier demo of this kind. Choose another folder with --folder."
            )
        (folder / MARK).write_text(json.dumps({"kind": kind}) + "\n", encoding="utf-8")
    except OSError as error:
        raise MassError(
            f"{folder}: cannot be written ({error.strerror}). Choose a writable folder with --folder."
        ) from None


def _kind(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / MARK).read_text(encoding="utf-8"))["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def place(target: Path, content: bytes, placed: Placed, name: str | None = None) -> None:
    """Write a file of the demo. One that is there and differs is somebody's work: it is kept under another name.

    Args:
        target: where it belongs.
        content: what it holds.
        placed: gets what became of it.
        name: what it is called there, if not by its own name; several files may share one.
    """
    name = name or target.name
    done = placed.written
    if target.exists():
        if target.read_bytes() == content:
            done = placed.reused
        else:
            kept = target.with_name(f"{target.stem}.old{target.suffix}")
            target.replace(kept)
            placed.kept.append(kept.name)
    if done is placed.written:
        target.parent.mkdir(parents=True, exist_ok=True)
        with drafted(target) as draft:
            draft.write_bytes(content)
    if name not in done:
        done.append(name)
