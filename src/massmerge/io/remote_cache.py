"""Copies of remote files on this machine, under names that say which version they are of.

~/.cache/massmerge (or MASS_CACHE)
  files/      files and small files of folders, by address and version
  bundles/    bundles, by the checksum of their manifest
  outputs/    what is made here before it is published, by its address
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from massmerge.errors import InputError
from massmerge.io.addresses import is_address
from massmerge.io.durable import drafted
from massmerge.io.remote import RemoteFile, download, list_files, look_up


def cache_folder(kind: str) -> Path:
    """A folder of the cache, which exists."""
    folder = _root() / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _root() -> Path:
    return Path(os.environ.get("MASS_CACHE") or "~/.cache/massmerge").expanduser().resolve()


def place_for(folder: Path, name: str) -> Path:
    """Where a file goes below a folder of the cache; the folders above it are there afterwards.

    Raises:
        InputError: a link on the way leads elsewhere, where nothing of ours belongs.
    """
    target = folder / name
    if target.parent.resolve() != target.parent:
        raise InputError(
            f"{target.parent}: is, or lies behind, a link. Remove it, or set MASS_CACHE to a folder of yours."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def staging_path(address: str) -> Path:
    """Where a result is made before it is sent to an address: the same for the same address, so that work resumes."""
    home = cache_folder("outputs") / hashlib.sha256(address.encode()).hexdigest()[:16]
    home.mkdir(exist_ok=True)
    return home / (address.rstrip("/").rpartition("/")[2] or "out")


def in_cache(path: Path) -> bool:
    """Whether something lies in the cache of bundles, where it is nobody's to change."""
    return path.resolve().is_relative_to(_root() / "bundles")


def revision_of(files: Mapping[str, RemoteFile]) -> str:
    """One name for the versions of several files."""
    said = sorted((name, file.size, file.version) for name, file in files.items())
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:40]


def fetch(files: Mapping[str, RemoteFile], revision: str) -> Path:
    """The folder of the cache that holds these files under their names; what is there is not fetched again."""
    folder = cache_folder("files") / revision
    for name, file in files.items():
        target = place_for(folder, name)
        if not target.is_file() or target.stat().st_size != file.size:
            with drafted(target) as draft:
                download(file, draft)
    return folder


def fetched(address: str) -> Path:
    """One file of a store on this machine.

    Raises:
        InputError: there is no such file.
    """
    file = look_up(address)
    if file is None:
        raise InputError(f"{address}: no such file.")
    return fetch({file.name: file}, revision_of({address: file})) / file.name


def local_rows(address: str) -> list[Path]:
    """Copies of a file with rows, or of the files of a folder, in the order of their names.

    Raises:
        InputError: nothing is there.
    """
    if look_up(address) is not None:
        return [fetched(address)]
    found = dict(sorted(list_files(address).items()))
    if not found:
        raise InputError(f"{address}: no such file or folder.")
    folder = fetch(found, revision_of(found))
    return [folder / name for name in found]


def path_of(text: str, folder: Path) -> Path:
    """What a recipe or a suite names, on this machine: a path from a folder, or the copy of a remote file."""
    return fetched(text) if is_address(text) else folder / Path(text).expanduser()
