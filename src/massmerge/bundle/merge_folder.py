"""What a merge keeps in its work folder to be able to resume, and what it does with an existing target.

.out.partial/
  fingerprint     what is being merged; a different merge starts over
  parts/          see `parts.py`: one file a finished tensor, and drafts
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from massmerge.bundle.layout import LEFT_OVER, MANIFEST
from massmerge.bundle.manifest import find_damage, read_manifest
from massmerge.bundle.parts import Parts, forget_headers
from massmerge.bundle.work_folder import Busy, WorkFolder, in_words
from massmerge.errors import InputError, listing
from massmerge.io.sealed import key_of

_MARK, _PARTS = "fingerprint", "parts"


class MergeFolder(WorkFolder):
    """What is finished of one merge.

    Args:
        target: the bundle or checkpoint that will be written.
        fingerprint: what the merge is of.
    """

    def __init__(self, target: Path, fingerprint: str) -> None:
        super().__init__(target)
        self._fingerprint = fingerprint
        self.parts = Parts(self.path / _PARTS, fingerprint)
        self.damaged: list[str] = []
        """Keys of parts that an earlier run has finished and the disk has not kept."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder for one merge; parts of a different merge are thrown away.

        Raises:
            MassError: another command holds it, or it cannot be written.
        """
        with in_words(self.path), self.held():
            self._begin()
            try:
                yield
            finally:
                forget_headers()

    def _begin(self) -> None:
        mark, parts = self.path / _MARK, self.path / _PARTS
        if not (mark.is_file() and mark.read_text(encoding="utf-8") == self._fingerprint):
            if parts.exists():
                shutil.rmtree(parts)
            mark.write_text(self._fingerprint, encoding="utf-8")
        parts.mkdir(exist_ok=True)
        found = sorted(parts.iterdir())
        with ThreadPoolExecutor() as pool:
            for path, key in zip(found, pool.map(self.parts.whole, found), strict=True):
                if key is not None:
                    self.parts.names[key] = path.name
                else:
                    path.unlink()
                    spoilt = key_of(path)  # none of a draft
                    self.damaged += [spoilt] if spoilt is not None else []

    def discard(self) -> None:
        """Remove everything that the merge made."""
        shutil.rmtree(self.path / _PARTS, ignore_errors=True)
        (self.path / _MARK).unlink(missing_ok=True)
        super().discard()


def recover(target: Path) -> None:
    """Clean up what an interrupted command left beside a bundle: restore it, or remove leftovers.

    While another command works there, nothing is done.
    """
    work = MergeFolder(target, "")
    if not work.path.is_dir():
        return
    with suppress(Busy), in_words(work.path), work.held():
        mark = work.path / _MARK
        unfinished = mark.read_text(encoding="utf-8") if mark.is_file() else None
        now = _fingerprint(work.target)
        if now is not None and now in (unfinished, _fingerprint(work.moved)):
            shutil.rmtree(work.moved, ignore_errors=True)  # it was killed right after the last rename
        if now is not None and unfinished in (now, None):  # the mark is gone if it was killed while it tidied up
            work.discard()


def _fingerprint(folder: Path) -> str | None:
    """What a bundle was made of; none if there is no bundle."""
    return read_manifest(folder).get("fingerprint") if (folder / MANIFEST).is_file() else None


def refuse_target(target: Path, fingerprint: str, *, overwrite: bool) -> bool:
    """Whether the target already is the result of this merge.

    Raises:
        InputError: something else is there, which is not overwritten, or only with `overwrite`.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    try:
        manifest = read_manifest(target)
    except InputError as error:
        raise InputError(
            f"{target}: exists and is not a readable bundle, so it is not overwritten. Choose another target, or "
            f"remove it yourself. ({str(error).partition('. ')[0]})"
        ) from None
    named = {target / MANIFEST, *(target / name for name in manifest["files"])}
    named |= {target / name for name in LEFT_OVER}
    held = (p for p in sorted(target.rglob("*")) if p.is_symlink() or not p.is_dir())
    foreign = [p.relative_to(target).as_posix() for p in held if p not in named]
    if overwrite and foreign:
        raise InputError(
            f"{target}: contains files that are not part of the bundle; move them elsewhere:{listing(foreign)}"
        )
    if overwrite:
        return False
    if manifest.get("fingerprint") != fingerprint:
        raise InputError(
            f"{target}: is a bundle made from another recipe or from sources that have changed since. Use "
            "`--overwrite` to replace it."
        )
    faults = find_damage(target, manifest)
    if faults:
        raise InputError(
            f"{target}: is the same bundle, but damaged:{listing(faults)}\n  Use `--overwrite` to replace it."
        )
    return True
